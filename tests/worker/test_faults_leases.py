"""Who may run a job, and when another one may: races at the edge of a lease, long time limits, workers side by side."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.clients.events import JobRef, Started
from tests.support.rig import Rig, abandon
from tests.support.worker_process import WorkerProcess, wait_until

JOB = {"prompt": "Hello", "max_tokens": 30, "seed": 3, "ignore_eos": True}
LEASE_S = 0.9


def test_of_eight_workers_that_see_the_same_abandoned_jobs_one_gets_each(rig: Rig) -> None:
    for number in range(64):
        abandon(rig, f"my-{number}", {**JOB, "max_tokens": 2})
    workers = [rig.worker(lease_s=20.0, block_s=0.05, max_num_seqs=3) for _ in range(8)]
    rig.wait_done(*rig.submitted)
    rig.wait_empty()
    assert all(len(rig.started(each)) == 1 for each in rig.submitted)
    assert sum(worker.counters.recovered for worker in workers) == 64
    assert sum(worker.counters.attempts for worker in workers) == 64
    assert sum(worker.counters.fenced for worker in workers) == 0


@pytest.mark.parametrize("leases", [0.9, 1.1, 2.2])
def test_a_loop_that_is_held_up_and_then_fails_writes_nothing_into_the_next_attempt(rig: Rig, leases: float) -> None:
    """What it says at last, that it hands the job over, comes just before, at, or long after the lease's end."""
    trouble = {"begins": False}

    def script(_: object) -> int:
        if not trouble["begins"]:
            return 97
        time.sleep(leases * LEASE_S / 3)  # the worker tries a step three times
        raise RuntimeError("the model broke")

    first = rig.worker(script=script, step_time_s=0.01, lease_s=LEASE_S, watchdog_s=0.1)
    rig.add("my-1", {**JOB, "max_tokens": 80})
    rig.wait_tokens("my-1", 5)
    trouble["begins"] = True
    second = rig.worker(script=lambda _: 97, step_time_s=0.01, lease_s=LEASE_S)
    assert first.wait() == 1
    rig.wait_done("my-1")
    rig.wait_empty()
    assert [each.worker for each in rig.started("my-1")] == [first.name, second.name]
    assert rig.num_tokens("my-1") == 80
    events = rig.events("my-1")
    begin = next(number for number, event in enumerate(events) if isinstance(event, Started) and event.attempt == 2)
    assert {event.id[0] for event in events[begin:]} == {events[begin].id[0]}, "all behind it is the second attempt's"
    assert second.is_alive


def test_a_round_of_renewals_that_fails_is_not_the_last(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = rig.worker(step_time_s=0.05, lease_s=LEASE_S)
    leases, trouble = worker.service.context.leases, iter([RuntimeError("not foreseen")])
    held = leases.held

    def failing_once() -> list[JobRef]:
        for error in trouble:
            raise error
        return held()

    monkeypatch.setattr(leases, "held", failing_once)
    rig.add("my-1", JOB)
    rig.wait_done("my-1")
    assert [each.attempt for each in rig.started("my-1")] == [1]
    assert [line[1] for line in worker.log.lines if line[0] == "error"] == ["leases cannot be renewed"]


def test_a_long_time_limit_does_not_put_recovery_off(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    first = start_worker(rig.server, rig.prefix, step_time_s=0.02, lease_s=1.0)
    rig.add("my-1", {**JOB, "timeout_ms": 3_600_000})
    rig.wait_tokens("my-1", 3)
    first.kill()
    killed_s = time.monotonic()
    rig.worker(lease_s=1.0)
    wait_until(lambda: len(rig.started("my-1")) == 2)
    assert time.monotonic() - killed_s < 1.0 + 1.0 + 1.0  # the lease, a sweep, and some
    rig.wait_done("my-1")


def test_two_workers_without_a_seed_give_different_answers(
    start_worker: Callable[..., WorkerProcess], rig: Rig
) -> None:
    """Two processes, made the same way, are asked the same twice each: four seeds, four answers."""
    for process in range(2):
        worker = start_worker(rig.server, rig.prefix)
        names = [f"my-{process}-{number}" for number in range(2)]
        for name in names:
            rig.add(name, {"prompt": "Hello", "max_tokens": 12, "ignore_eos": True})
        rig.wait_done(*names)
        worker.stop()
        assert worker.wait() == 0
    assert len({rig.started(name)[0].worker for name in rig.submitted}) == 2
    assert len({rig.started(name)[0].seed for name in rig.submitted}) == 4
    assert len({tuple(rig.told(name)[0].token_ids) for name in rig.submitted}) == 4


def test_a_reader_that_goes_away_holds_nothing_up(rig: Rig) -> None:
    """Nobody confirms what was read: a request that nobody follows any more ends, and its blocks are free."""
    from headrace.clients import Client

    worker = rig.worker(step_time_s=0.01)
    engine: Any = worker.engine
    with Client(rig.server.url, prefix=rig.prefix) as client:
        handle = client.submit("Hello", id="my-1", max_tokens=60, ignore_eos=True)
        with handle.stream(timeout_s=10) as stream:
            while not getattr(next(stream), "token_ids", ()):
                pass
    rig.submitted.append("my-1")
    rig.wait_done("my-1")
    wait_until(lambda: engine.stats().free_blocks == engine.stats().total_blocks)
    assert rig.num_tokens("my-1") == 60
