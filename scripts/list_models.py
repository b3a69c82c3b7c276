"""Write docs/models.md: what becomes of every causal language model that transformers knows.

Called as `python scripts/list_models.py`, or with model types, to print what becomes of those. Each type is tried with
its default configuration in a process of its own, under a time limit: natively, if our decoder has the architecture,
or else by the self-check that every load of such a model runs (`engine/models/self_check.py`).
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace.engine.errors import UnsupportedModelError
from headrace.engine.families import FAMILIES
from headrace.engine.models.self_check import self_check
from headrace.engine.models.transformers_config import transformers_config
from headrace.kernels.backend import open_backend

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
LIMIT_S = 120.0
AT_ONCE = 2
NATIVE, CHECKED = "native", "checked"
CHECKED_HEAD = "Packed, in chunks and from the paged cache they score what they score by themselves."
HEAD = """# Models

What becomes of every causal language model that transformers {version} knows, each in its default configuration.
Written by `scripts/list_models.py`; do not edit.

A checkpoint is judged by its own configuration whenever it is loaded, not by this page: an option can bring an
architecture from one list to another. Encoder-decoders, models that bring their own code, and quantised weights but
gpt-oss's in 4 bits are refused whatever they are.
"""


@dataclass(frozen=True)
class Verdict:
    """What becomes of one model type; `result` is `NATIVE`, `CHECKED` or why it is refused."""

    model_type: str
    architecture: str
    result: str


def judge(model_type: str) -> str:
    """Try one model type in this process."""
    architecture = architecture_of(model_type)
    if architecture in FAMILIES:
        return NATIVE
    torch.set_num_threads(1)
    try:
        config = CONFIG_MAPPING[model_type]()
        if config.to_dict().get("head_dim", 0) is None:  # every checkpoint of these names it
            config.head_dim = config.hidden_size // config.num_attention_heads
    except Exception as error:  # noqa: BLE001  (a configuration's code is not ours; what it raises is the result)
        return f"it has no default configuration: {type(error).__name__}"
    try:
        self_check(transformers_config(architecture, config, frozenset()), open_backend("auto", "cpu"))
    except UnsupportedModelError as error:
        return str(error).split(": ", 1)[-1].removesuffix(".")
    return CHECKED


def architecture_of(model_type: str) -> str:
    """Name of the class."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def judged(model_type: str) -> Verdict:
    """Try one model type in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def send(pipe: Any) -> None:
        pipe.send(judge(model_type))

    process = context.Process(target=send, args=(there,), daemon=True)
    process.start()
    there.close()
    result = f"its self-check takes longer than {LIMIT_S:.0f} s"
    try:
        if here.poll(LIMIT_S):
            result = here.recv()
    except EOFError:
        result = "its self-check ends the process"
    process.kill()
    process.join()
    return Verdict(model_type, architecture_of(model_type), result)


def page(verdicts: list[Verdict]) -> str:
    """The whole page."""
    native = [v for v in verdicts if v.result == NATIVE]
    checked = [v for v in verdicts if v.result == CHECKED]
    refused = [v for v in verdicts if v.result not in (NATIVE, CHECKED)]
    parts = [
        HEAD.format(version=transformers.__version__),
        f"## Native ({len(native)})\n\nOur own decoder and kernels.\n\n" + _table(native),
        f"## Through transformers' code ({len(checked)})\n\n{CHECKED_HEAD}\n\n" + _table(checked),
        f"## Refused ({len(refused)})\n\n" + _table(refused, reasons=True),
    ]
    return "\n".join(parts)


def _table(verdicts: list[Verdict], *, reasons: bool = False) -> str:
    more = (" why |", "---|") if reasons else ("", "")
    rows = [f"| model type | architecture |{more[0]}", f"|---|---|{more[1]}"]
    for v in verdicts:
        why = f" {v.result.replace('|', ' ')} |" if reasons else ""
        rows.append(f"| {v.model_type} | `{v.architecture}` |{why}")
    return "\n".join(rows) + "\n"


def main(model_types: list[str]) -> None:
    """Judge the types named and print, or all of them and write the page."""
    wanted = model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        verdicts = list(pool.map(judged, wanted))
    if model_types:
        for v in verdicts:
            print(f"{v.model_type:24} {v.architecture:32} {v.result}")
    else:
        PAGE.write_text(page(verdicts), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write docs/models.md, or print what becomes of some model types.")
    known = ", ".join(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("model_types", nargs="*", metavar="TYPE", help=f"any of {known}")
    main(parser.parse_args().model_types)
