"""A worker is killed in the middle of its answers, another one goes on: the tokens are those of transformers alone."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.clients import Client
from headrace.clients.events import Started, Tokens
from tests.support import families, foreign_families
from tests.support.checkpoints import tokenizer
from tests.support.command import PROGRAM
from tests.support.server import Server
from tests.support.torch_rig import prompt
from tests.support.worker_process import wait_until

MODELS = {
    "mistral": (families.family_checkpoint, families.family_reference),  # windows in every layer
    "gemma2": (families.family_checkpoint, families.family_reference),  # windows in every other one, and caps
    "gpt2": (foreign_families.family_checkpoint, foreign_families.family_model),  # through transformers' own code
}
TOKENS = 190  # with the longest prompt, what the smallest context holds: there must be time to kill in mid-answer
LENGTHS = (20, 3, 26, 57)
Crew = dict[str, "subprocess.Popen[bytes]"]  # a worker's name → its process


@pytest.fixture
def workers(server: Server, queue: str, tmp_path: Path) -> Iterator[Callable[[Path], Callable[[], Crew]]]:
    """`workers(folder)` starts two workers on a checkpoint; calling what it gives waits until both serve."""
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path) -> Callable[[], Crew]:
        # whoever is to kill a worker in the midst of an answer must come before it
        command = [
            "nice",
            "-n",
            "19",
            *PROGRAM,
            "worker",
            "--model",
            str(folder),
            "--redis-url",
            server.url,
            "--queue",
            queue,
        ]
        command += ["--lease", "1s", "--num-threads", "1", "--num-kv-blocks", "200"]
        logs = [tmp_path / f"worker-{number}.log" for number in range(2)]
        for log in logs:
            with log.open("wb") as out:
                started.append(subprocess.Popen(command, stdout=out, stderr=out, cwd=tmp_path))
        return lambda: wait(logs)

    def wait(logs: list[Path]) -> Crew:
        for process, log in zip(started, logs, strict=True):
            wait_until(
                lambda log=log, process=process: "event=ready" in log.read_text() or process.poll() is not None,
                60, f"{log} says that it serves",
            )  # fmt: skip
            assert process.poll() is None, log.read_text()
        with server.client() as client:
            names = [key.decode().rsplit(":", 1)[1] for key in client.scan_iter(match=f"headrace:{{{queue}}}:worker:*")]
        return {next(name for name in names if f"-{each.pid}-" in name): each for each in started}

    yield start
    for process in started:
        process.kill()
        process.wait()


def alone(model: Any, length: int) -> list[int]:
    """What transformers generates greedily after this prompt by itself."""
    ids = torch.tensor([prompt(length, families.VOCAB)])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": families.VOCAB + 1}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, length:].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_another_worker_goes_on_with_the_tokens_of_transformers(
    name: str, server: Server, queue: str, tmp_path: Path, workers: Callable[[Path], Callable[[], Crew]]
) -> None:
    checkpoint, reference = MODELS[name]
    folder = tmp_path / name
    shutil.copytree(checkpoint(name), folder)
    tokenizer().save_pretrained(folder)
    serving = workers(folder)
    wanted = [alone(reference(name), length) for length in LENGTHS]
    crew = serving()
    with Client(server.url, queue=queue) as client:
        handles = [
            client.submit(
                prompt_token_ids=prompt(length, families.VOCAB), max_tokens=TOKENS, temperature=0, ignore_eos=True
            )
            for length in LENGTHS
        ]
        with handles[0].stream() as stream:
            first = next(event for event in stream if isinstance(event, Started))
            next(event for event in stream if isinstance(event, Tokens) and event.index >= 9)
            crew[first.worker].send_signal(signal.SIGKILL)
            events = list(stream)
        results = [handle.result(timeout_s=30) for handle in handles]
    (second,) = (event for event in events if isinstance(event, Started))
    assert second.worker != first.worker
    assert 10 <= second.resumed[0] < TOKENS, "in the middle of the answer"
    assert [list(result.token_ids) for result in results] == wanted
