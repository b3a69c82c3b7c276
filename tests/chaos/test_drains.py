"""Workers told to end while there is work: others go on with it soon, and it is not held against the jobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.chaos_queue import ChaosQueue, unless_stalled
from tests.support.chaos_workers import Worker
from tests.support.worker_process import wait_until

LONG: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True}
PROMPTLY_MS = 2000


def _released(queue: ChaosQueue, names: list[str]) -> list[str]:
    """Those that were handed over."""
    return [name for name in names if any(attempt.released for attempt in queue.report(name).attempts)]


def _drained(queue: ChaosQueue, spawn: Callable[..., Worker], number: int, step_time_s: float) -> int:
    """Have a worker hand over so many jobs to one that has a job of its own, with steps of that length.

    Returns the longest time in ms until one was taken up again.
    """
    tag = f"run{len(queue.jobs)}"
    names = [f"{tag}-{index}" for index in range(number)]
    first = spawn(queue, step_time_s=0.05, max_num_seqs=number, num_blocks=2048, drain_timeout_s=0.2, lease_s=30.0)
    first.wait_ready()
    for index, name in enumerate(names):
        queue.add(name, prompt=f"Hello {index}", seed=index, **LONG)
    wait_until(lambda: all(queue.num_tokens(name) for name in names), 20, "all have begun")
    second = spawn(queue, lease_s=30.0, max_num_seqs=64, num_blocks=4096, step_time_s=step_time_s)
    queue.add(f"{tag}-own", prompt="own", seed=1, **LONG)
    queue.wait_tokens(f"{tag}-own", int(1.5 / step_time_s))  # so that it has looked around at least once meanwhile
    first.stop()
    wait_until(lambda: len(_released(queue, names)) == number, 20, "all are handed over")
    released_ms = queue.now_ms()
    assert first.wait() == 0
    for name in names:
        queue.wait_attempts(name, 2, timeout_s=60)
    queue.wait_empty()
    second.stop()
    assert second.wait() == 0
    return max(queue.report(name).attempts[1].at_ms for name in names) - released_ms


def test_another_worker_goes_on_within_two_seconds(
    chaos_queue: ChaosQueue, spawn: Callable[..., Worker], progress: Callable[[str], None]
) -> None:
    def run() -> None:
        took_ms = _drained(chaos_queue, spawn, 12, step_time_s=0.02)
        progress(f"12 jobs taken up again after {took_ms} ms")
        assert took_ms < PROMPTLY_MS

    unless_stalled(run, stall_s=0.3)
    found = chaos_queue.judge()
    assert all(report.num_charged == 0 for report in found.reports.values())


@pytest.mark.full_size
def test_a_busy_worker_goes_on_within_two_seconds_too(
    chaos_queue: ChaosQueue, spawn: Callable[..., Worker], progress: Callable[[str], None]
) -> None:
    """Its steps take a seventh of a second, as without a GPU; how it looks for work may not depend on it."""

    def run() -> None:
        took_ms = _drained(chaos_queue, spawn, 4, step_time_s=0.15)
        progress(f"4 jobs taken up again by a busy worker after {took_ms} ms")
        assert took_ms < PROMPTLY_MS

    unless_stalled(run, stall_s=0.3)
    chaos_queue.judge()


def test_many_at_once_are_gone_on_with_as_soon(
    chaos_queue: ChaosQueue, spawn: Callable[..., Worker], progress: Callable[[str], None]
) -> None:
    """More than are taken at once: the rest need not wait for the next look around."""

    def run() -> None:
        took_ms = _drained(chaos_queue, spawn, 40, step_time_s=0.02)
        progress(f"40 jobs taken up again after {took_ms} ms")
        assert took_ms < PROMPTLY_MS

    unless_stalled(run, stall_s=0.3)
    chaos_queue.judge()


def test_a_second_signal_hands_back_at_once(chaos_queue: ChaosQueue, spawn: Callable[..., Worker]) -> None:
    def run() -> None:
        tag = f"run{len(chaos_queue.jobs)}"
        first = spawn(chaos_queue, step_time_s=0.05, drain_timeout_s=60.0)
        for index in range(4):
            chaos_queue.add(f"{tag}-{index}", prompt=f"Hello {index}", seed=index, **LONG)
        names = [name for name in chaos_queue.jobs if name.startswith(tag)]
        wait_until(lambda: all(chaos_queue.num_tokens(name) for name in names), 20, "all have begun")
        first.stop()
        time.sleep(0.3)
        assert first.is_alive  # it has a minute
        begun_s = time.monotonic()
        first.stop()
        assert first.wait() == 0
        took_s = time.monotonic() - begun_s
        rows = chaos_queue.raw.xpending_range(chaos_queue.keys.jobs(), "workers", "-", "+", 10)
        assert {row["consumer"] for row in rows} == {b"-"}
        assert _released(chaos_queue, names) == names
        second = spawn(chaos_queue)
        chaos_queue.wait_empty()
        second.kill()
        assert took_s < 1.0

    unless_stalled(run, stall_s=0.3)
    found = chaos_queue.judge()
    assert all(report.num_charged == 0 for report in found.reports.values())
    assert all(len(report.attempts) == 2 for report in found.reports.values())


def test_workers_are_told_to_end_all_along(
    chaos_queue: ChaosQueue, spawn: Callable[..., Worker], is_full: bool, progress: Callable[[str], None]
) -> None:
    """A rolling restart, faster than any job: each worker hands everything over, ten times in a row and more."""
    num_jobs, num_restarts = (40, 25) if is_full else (8, 5)
    for number in range(num_jobs):
        chaos_queue.add(f"job-{number}", prompt=f"Hello {number}", seed=number, **LONG)
    for _ in range(num_restarts):
        worker = spawn(chaos_queue, step_time_s=0.02, drain_timeout_s=0.0, max_num_seqs=64, num_blocks=4096)
        worker.wait_ready()
        time.sleep(0.25)
        worker.stop()
        assert worker.wait() == 0
    last = spawn(chaos_queue, max_num_seqs=64, num_blocks=4096)
    found = chaos_queue.judge()
    last.stop()
    assert last.wait() == 0
    attempts = [len(report.attempts) for report in found.reports.values()]
    progress(f"{num_restarts} restarts: {sum(attempts)} attempts, at most {max(attempts)} for one job")
    assert found.dead == []
    assert max(attempts) > num_restarts / 2
    for report in found.reports.values():
        assert all(attempt.released for attempt in report.attempts[:-1])
