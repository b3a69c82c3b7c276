"""Workers killed and frozen all along, on a network that loses replies: every request is told once, whole, in order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.support.chaos_fleet import Fleet, run_to_the_end, submit_while
from tests.support.chaos_load import make_job
from tests.support.chaos_queue import ChaosQueue
from tests.support.chaos_trouble import NetworkTrouble
from tests.support.chaos_workers import Worker
from tests.support.proxy import Proxy


@pytest.mark.core
def test_jobs_survive_kills_freezes_and_a_bad_network(
    chaos_queue: ChaosQueue,
    proxy_to: Callable[..., Proxy],
    spawn: Callable[..., Worker],
    chance: random.Random,
    progress: Callable[[str], None],
    is_full: bool,
    amount: Callable[..., tuple[int, int, int]],
) -> None:
    num_jobs, kills, freezes = amount((1000, 50, 20), (60, 4, 2), (20, 2, 1))
    pause_s = 1.8 if is_full else 0.8
    proxy = proxy_to(chaos_queue.server)
    fleet = Fleet(lambda: spawn(proxy, step_time_s=0.01, max_num_seqs=12), 3, chance)
    trouble = NetworkTrouble(proxy, chance, pause_s=0.25)
    jobs = {f"job-{number}": make_job(chance, longest=150) for number in range(num_jobs)}
    submit_while(fleet, chaos_queue.producer, jobs, over_s=pause_s * (kills + freezes))
    fleet.fire(kills, freezes, pause_s, *[chaos_queue.raw.script_flush] * (kills // 5))
    run_to_the_end(fleet, chaos_queue.producer, progress, limit_s=600 if is_full else 90)
    trouble.end()
    fleet.stop()
    found = chaos_queue.judge()
    progress(
        f"{fleet.num_kills} kills, {fleet.num_freezes} freezes, network {dict(trouble.done)}: "
        f"{len(found.reports)} ends {dict(found.reasons)}, {found.num_attempts} attempts, {len(found.dead)} dead"
    )
    assert (fleet.num_kills, fleet.num_freezes) == (kills, freezes)
    assert set(found.reasons) <= {"stop", "length"}, found.errors
    assert len(found.reports) == num_jobs
    assert found.dead == []
    if kills > 2:  # two may have met idle workers
        assert found.num_attempts > num_jobs  # somebody was hit
