"""Cancelling: what is queued ends at once, what runs within two steps, and no cancel ever does harm."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from headrace.clients import CancelOutcome
from tests.support.chaos_fleet import Fleet, run_to_the_end
from tests.support.chaos_load import make_job
from tests.support.chaos_queue import ChaosQueue, unless_stalled
from tests.support.chaos_workers import Worker
from tests.support.worker_process import wait_until

STEP_S = 0.1


def test_queued_jobs_end_at_once_without_a_worker(chaos_queue: ChaosQueue, spawn: Callable[..., Worker]) -> None:
    client = chaos_queue.producer.client
    for number in range(20):
        chaos_queue.producer.add(f"job-{number}", {"prompt": "Hello", "max_tokens": 5, "seed": number}, bare=False)
    outcomes = [client.cancel(f"job-{number}") for number in range(10)]
    assert outcomes == [CancelOutcome.CANCELLED] * 10
    assert all(chaos_queue.report(f"job-{number}").end for number in range(10))
    assert [client.cancel(f"job-{number}") for number in range(10)] == [CancelOutcome.FINISHED] * 10
    spawn(chaos_queue)
    found = chaos_queue.judge()
    assert found.reasons["cancelled"] == 10
    assert not any(found.reports[f"job-{number}"].attempts for number in range(10))
    assert all(len(found.reports[f"job-{number}"].attempts) == 1 for number in range(10, 20))


def test_running_jobs_end_within_two_steps(chaos_queue: ChaosQueue, spawn: Callable[..., Worker]) -> None:
    worker = spawn(chaos_queue, step_time_s=STEP_S)
    worker.wait_ready()
    names = [f"job-{number}" for number in range(6)]
    for number, name in enumerate(names):
        chaos_queue.add(name, prompt=f"Hello {number}", seed=number, n=1 + number % 2, max_tokens=400, ignore_eos=True)
    wait_until(lambda: all(chaos_queue.num_tokens(name) > 2 for name in names), 20, "all run")
    for name in names:
        assert chaos_queue.producer.client.cancel(name) == CancelOutcome.REQUESTED
    flagged = {name: chaos_queue.num_tokens(name) for name in names}
    found = chaos_queue.judge()
    for name in names:
        per_step = len(found.reports[name].choices)
        assert found.reports[name].num_tokens - flagged[name] <= 2 * per_step
    assert found.reasons == {"cancelled": 6}
    key = chaos_queue.keys.worker(worker.name)
    wait_until(lambda: _blocks(chaos_queue, key), 5, "every block is free")


def _blocks(queue: ChaosQueue, key: str) -> bool:
    free, total = queue.raw.hmget(key, "free_kv_blocks", "total_kv_blocks")
    return bool(free == total and total is not None)


def test_a_prefill_of_thirty_thousand_tokens_is_cancelled_on_its_way(
    chaos_queue: ChaosQueue, spawn: Callable[..., Worker], progress: Callable[[str], None]
) -> None:
    """512 tokens a step and nothing to append meanwhile: it is asked about four times a second."""
    spawn(chaos_queue, step_time_s=0.05, max_model_len=40_000, num_blocks=2_600).wait_ready()

    def run() -> None:
        name = f"job-{len(chaos_queue.jobs)}"
        chaos_queue.add(name, prompt_token_ids=[65 + number % 26 for number in range(30_000)], max_tokens=5, seed=1)
        chaos_queue.wait_attempts(name, 1)
        time.sleep(0.5)
        assert chaos_queue.producer.client.cancel(name) == CancelOutcome.REQUESTED
        begun_s = time.monotonic()
        wait_until(lambda: chaos_queue.report(name).end, 20, "it ends")
        took_s = time.monotonic() - begun_s
        progress(f"ended {took_s * 1000:.0f} ms after its cancelling")
        assert chaos_queue.report(name).num_tokens == 0
        assert took_s < 0.25 + 2 * 0.2

    unless_stalled(run, stall_s=0.1)
    found = chaos_queue.judge()
    assert found.reasons == {"cancelled": len(chaos_queue.jobs)}


def test_double_late_and_unknown_cancels_do_no_harm(
    chaos_queue: ChaosQueue,
    spawn: Callable[..., Worker],
    chance: random.Random,
    progress: Callable[[str], None],
    is_full: bool,
) -> None:
    """A storm of them, over jobs of every kind and age, while workers die."""
    num_jobs, kills = (200, 12) if is_full else (40, 2)
    client = chaos_queue.producer.client
    fleet = Fleet(lambda: spawn(chaos_queue, step_time_s=0.01), 2, chance)
    outcomes: list[tuple[str, CancelOutcome]] = []

    def cancel_some() -> None:
        for request_id in chance.sample([*jobs, "unknown-1", "unknown-2"], 4):
            outcomes.extend((request_id, client.cancel(request_id)) for _ in range(chance.randint(1, 2)))

    jobs: dict[str, dict[str, Any]] = {f"job-{number}": make_job(chance, longest=120) for number in range(num_jobs)}
    for number, (request_id, job) in enumerate(jobs.items()):
        fleet.later(0.05 * number, lambda each=request_id, what=job: chaos_queue.producer.add(each, what))
    for number in range(num_jobs):
        fleet.later(0.05 * number, cancel_some)
    fleet.fire(kills, 0, 0.05 * num_jobs / kills)
    run_to_the_end(fleet, chaos_queue.producer, progress, limit_s=180)
    outcomes += [(request_id, client.cancel(request_id)) for request_id in jobs]
    found = chaos_queue.judge()
    counts = {outcome.value: [each for _, each in outcomes].count(outcome) for outcome in CancelOutcome}
    progress(f"{len(outcomes)} cancels {counts}: ends {dict(found.reasons)}")
    assert all(outcome is CancelOutcome.FINISHED for _, outcome in outcomes[-num_jobs:])
    assert {outcome for request_id, outcome in outcomes if request_id.startswith("unknown")} == {CancelOutcome.UNKNOWN}
    assert set(found.reasons) == {"cancelled", "stop", "length"}
    for request_id, outcome in outcomes:
        if outcome is CancelOutcome.CANCELLED:
            assert found.reports[request_id].attempts == []
    assert not any(request_id.startswith("unknown") for request_id in found.reports)
