"""The same with a real model: workers of the command on the model that ships, killed on the way. Full size only."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos_checker import Report
from tests.support.chaos_queue import ChaosQueue
from tests.support.command import PROGRAM
from tests.support.demo_worker import ROOT
from tests.support.worker_process import wait_until

PROMPTS = ("Tell me a story.", "What is a river?", "Sag mir etwas über Brot.", "🙂 Hallo! 世界", "Count to ten.")


@pytest.fixture
def demo(chaos_queue: ChaosQueue, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """`demo()` starts a worker on the demo model; it serves when this returns."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [*PROGRAM, "worker", "--model", "demo", "--lease", "2s"]
        command += ["--redis-url", chaos_queue.url, "--prefix", chaos_queue.prefix, "--num-threads", "1"]
        log = tmp_path / f"demo-{len(started)}.log"
        with log.open("wb") as out:
            started.append(subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT))
        wait_until(lambda: "ready" in log.read_text(), 120, "the worker serves")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def _job(number: int, chance: random.Random) -> dict[str, Any]:
    job: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}]}
    job |= {"max_tokens": 500, "seed": number, "temperature": chance.choice((0, 0.8)), "ignore_eos": True}
    if number % 3 == 0:
        job |= {"logprobs": 2, "n": 2}
    if number % 4 == 1:
        job |= {"stop": ["the", "der"], "min_tokens": 40}
    return job


def _said(report: Report) -> dict[int, tuple[list[int], str, Any, Any]]:
    return {
        index: (choice.token_ids, choice.text, choice.reason, choice.stop) for index, choice in report.choices.items()
    }


@pytest.mark.full_size  # the model takes seconds to load
def test_killed_workers_of_the_demo_model_leave_no_mark(
    chaos_queue: ChaosQueue,
    demo: Callable[[], subprocess.Popen[bytes]],
    chance: random.Random,
    progress: Callable[[str], None],
) -> None:
    jobs = {f"job-{number}": _job(number, chance) for number in range(12)}
    crew = [demo(), demo()]
    for name, job in jobs.items():
        chaos_queue.producer.add(name, job, bare=False)
    for _ in range(3):
        wait_until(lambda: any(chaos_queue.num_tokens(name) for name in jobs), 20, "something runs")
        time.sleep(chance.uniform(0.3, 1.0))  # all of it takes far longer
        victim = crew.pop(0)
        victim.kill()
        victim.wait()
        crew.append(demo())
    chaos_queue.wait_empty(timeout_s=240)
    again = {f"undisturbed-{name}": job for name, job in jobs.items()}
    for name, job in again.items():
        chaos_queue.producer.add(name, job, bare=False)
    chaos_queue.wait_empty(timeout_s=240)
    attempts = 0
    for name in jobs:
        disturbed, whole = chaos_queue.report(name), chaos_queue.report(f"undisturbed-{name}")
        attempts += len(disturbed.attempts)
        assert _said(disturbed) == _said(whole), name
        assert {i: each.logprobs for i, each in disturbed.choices.items()} == {
            i: each.logprobs for i, each in whole.choices.items()
        }
    progress(f"{len(jobs)} requests, {attempts} attempts, nobody can tell")
    assert attempts > len(jobs)
    chaos_queue.jobs.clear()  # the judge knows the chaos model's answers only
    chaos_queue.judge()
