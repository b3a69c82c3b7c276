"""A server that is killed, restarted, emptied, out of memory or without its groups, under load."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.support.chaos_fleet import Fleet, logs_of, run_to_the_end, submit_while
from tests.support.chaos_load import make_job
from tests.support.chaos_queue import ChaosQueue
from tests.support.chaos_workers import Worker
from tests.support.server import Server
from tests.support.worker_process import wait_until


@pytest.fixture
def fleet_on(spawn: Callable[..., Worker], chance: random.Random) -> Callable[[ChaosQueue], Fleet]:
    """`fleet_on(queue)`: two workers."""
    return lambda queue: Fleet(lambda: spawn(queue, step_time_s=0.01), 2, chance)


@pytest.mark.core
def test_restarted_under_load_nothing_is_lost(
    own_server: Callable[..., Server],
    queue_on: Callable[[Server], ChaosQueue],
    fleet_on: Callable[[ChaosQueue], Fleet],
    chance: random.Random,
    progress: Callable[[str], None],
    amount: Callable[..., tuple[int, int, float]],
) -> None:
    """With an append-only file that is flushed with every write; ended in order or killed."""
    num_jobs, restarts, pause_s = amount((300, 10, 3.0), (30, 2, 0.8), (15, 1, 0.6))
    server = own_server("--appendfsync", "always", appendonly=True)
    queue = queue_on(server)
    fleet = fleet_on(queue)
    pids: list[int] = []

    def restart() -> None:
        pids.append(server.pid)
        if chance.random() < 0.7:
            server.kill()
        server.restart()

    jobs = {f"job-{number}": make_job(chance, longest=100) for number in range(num_jobs)}
    submit_while(fleet, queue.producer, jobs, over_s=restarts * pause_s)
    fleet.fire(restarts // 3, 0, pause_s, *[restart] * restarts)
    run_to_the_end(fleet, queue.producer, progress, limit_s=240)
    fleet.stop()
    found = queue.judge()
    progress(f"{len(pids)} restarts: {len(found.reports)} ends {dict(found.reasons)}, {found.num_attempts} attempts")
    assert len({*pids, server.pid}) == restarts + 1
    assert len(found.reports) == num_jobs
    assert set(found.reasons) <= {"stop", "length"}, found.errors
    assert found.dead == []


def test_groups_destroyed_and_scripts_forgotten_under_load(
    chaos_queue: ChaosQueue,
    fleet_on: Callable[[ChaosQueue], Fleet],
    chance: random.Random,
    progress: Callable[[str], None],
    is_full: bool,
) -> None:
    """Entries stay in their streams: they are delivered anew, and what runs already is not run twice to a reader."""
    num_jobs, faults, pause_s = (200, 30, 1.0) if is_full else (30, 3, 0.5)
    fleet = fleet_on(chaos_queue)

    def destroy() -> None:
        chaos_queue.raw.xgroup_destroy(chance.choice(chaos_queue.keys.all_jobs), "workers")

    def destroy_all() -> None:
        for key in chaos_queue.keys.all_jobs:
            chaos_queue.raw.xgroup_destroy(key, "workers")
        chaos_queue.raw.script_flush()

    jobs = {f"job-{number}": make_job(chance, longest=100) for number in range(num_jobs)}
    submit_while(fleet, chaos_queue.producer, jobs, over_s=faults * pause_s)
    fleet.fire(faults // 4, 0, pause_s, *[chance.choice((destroy, destroy_all)) for _ in range(faults)])
    run_to_the_end(fleet, chaos_queue.producer, progress, limit_s=240)
    fleet.stop()
    found = chaos_queue.judge()
    progress(f"{faults} groups destroyed: {dict(found.reasons)}, {found.num_attempts} attempts")
    assert set(found.reasons) <= {"stop", "length"}, found.errors
    assert len(found.reports) == num_jobs


def test_everything_flushed_under_load(
    own_server: Callable[..., Server],
    queue_on: Callable[[Server], ChaosQueue],
    fleet_on: Callable[[ChaosQueue], Fleet],
    chance: random.Random,
    progress: Callable[[str], None],
    is_full: bool,
) -> None:
    """What was there is gone, and every request that is submitted again runs: nobody crashes, nobody hangs."""
    num_jobs, flushes = (60, 12) if is_full else (20, 2)
    server = own_server()
    queue = queue_on(server)
    fleet = fleet_on(queue)
    for round_number in range(flushes):
        for number in range(num_jobs):
            request_id = f"job-{number}"
            job = queue.jobs.get(request_id) or make_job(chance, longest=100)
            queue.producer.add(request_id, job, bare=False)
        end_s = time.monotonic() + chance.uniform(0.2, 0.8)
        while time.monotonic() < end_s:
            fleet.turn()
            time.sleep(0.02)
        if round_number < flushes - 1:
            queue.raw.flushall()
    run_to_the_end(fleet, queue.producer, progress, limit_s=120)
    fleet.stop()
    found = queue.judge()
    progress(f"{flushes - 1} times flushed: {dict(found.reasons)}")
    assert set(found.reasons) <= {"stop", "length"}, found.errors
    assert len(found.reports) == num_jobs


def test_out_of_memory_stops_the_taking_and_goes_on_with_room(
    own_server: Callable[..., Server], queue_on: Callable[[Server], ChaosQueue], spawn: Callable[..., Worker]
) -> None:
    server = own_server()
    queue = queue_on(server)
    # One at a time, so that jobs are left for which there is room.
    workers = [spawn(queue, step_time_s=0.02, max_num_seqs=64, take_limit=1, num_blocks=1024) for _ in range(2)]
    for number in range(40):
        queue.add(f"job-{number}", prompt=f"Hello {number}", seed=number, max_tokens=60, ignore_eos=True)
    wait_until(lambda: queue.num_tokens("job-1") > 3, 20, "it runs")
    queue.raw.config_set("maxmemory", 1_000_000)
    time.sleep(0.5)  # what was under way comes in
    before = _state(queue)
    time.sleep(1.0)
    assert _state(queue) == before
    assert before[0] < 40
    assert all(worker.is_alive for worker in workers), logs_of(workers)
    queue.raw.config_set("maxmemory", 0)
    found = queue.judge()
    assert len(found.reports) == 40
    assert found.reasons == {"length": 40}
    for worker in workers:
        worker.stop()
        assert worker.wait() == 0
        assert worker.counter("out_of_memory") > 0
    assert found.dead == []


def _state(queue: ChaosQueue) -> tuple[int, int]:
    """Entries that were ever taken, and tokens that were ever told."""
    [group] = queue.raw.xinfo_groups(queue.keys.jobs())
    names = [name for name in queue.jobs if queue.raw.exists(queue.keys.out(name))]
    return group["entries-read"], sum(queue.num_tokens(name) for name in names)
