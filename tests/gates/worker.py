"""Compiles what it is told to, for one version of Triton: a line of JSON in, a line of JSON out.

    {"capability": 90, "launch": "Llama-3.1-8B decode bf16"}        {"script": "windows"}

Triton's caches make the second compilation of anything cheap, in the process and on disk.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from tests.support.fake_gpu import Compiled, fake_gpu
from tests.support.kernel_launches import Launch, launches
from tests.support.kernel_limits import faults, programs
from tests.support.kernel_script import SCRIPTS, play


@cache
def known(capability: int) -> dict[str, Launch]:
    return {each.name: each for each in launches(capability)}


def compiled(launch: Launch) -> dict[str, Any]:
    """Everything about the kernels of one launch that the gates look at."""
    with fake_gpu(launch.capability) as seen:
        launch.run()
    return {"kernels": list(described(seen, launch.capability))}


def described(seen: list[Compiled], capability: int) -> Iterator[dict[str, Any]]:
    for one in seen:
        about = asdict(one)
        del about["ptx"], about["ttgir"]
        yield {**about, "programs": programs(one, capability), "faults": faults(one, capability)}


def answer(task: dict[str, Any]) -> dict[str, Any]:
    run: Callable[[], dict[str, Any]]
    if "script" in task:
        run = lambda: asdict(play(SCRIPTS[task["script"]]))  # noqa: E731
    else:
        run = lambda: compiled(known(task["capability"])[task["launch"]])  # noqa: E731
    try:
        return run()
    except Exception as error:  # noqa: BLE001  whatever a compiler raises is the result
        return {"error": f"{type(error).__name__}: {str(error)[:600]}"}


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
