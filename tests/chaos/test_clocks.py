"""Workers whose clocks are off by hours: nobody can tell, for only the server's clock counts."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

from tests.support.chaos_fleet import Fleet, run_to_the_end, submit_while
from tests.support.chaos_load import make_job
from tests.support.chaos_queue import ChaosQueue
from tests.support.chaos_workers import Worker

HOUR_S = 3600.0
# Wall clock off, and a machine that has been up for another time: ahead, behind, both.
CLOCKS = ((7 * HOUR_S, 1e6), (-9 * HOUR_S, 0.0), (400 * 24 * HOUR_S, 5e7))


def test_clocks_off_by_hours_change_nothing(
    chaos_queue: ChaosQueue,
    spawn: Callable[..., Worker],
    chance: random.Random,
    progress: Callable[[str], None],
    is_full: bool,
) -> None:
    num_jobs, kills, freezes, pause_s = (120, 10, 4, 1.5) if is_full else (20, 2, 1, 0.5)
    clocks = iter(CLOCKS * 100)
    started: list[tuple[Worker, float]] = []

    def start() -> Worker:
        off_s, uptime_s = next(clocks)
        worker = spawn(chaos_queue, step_time_s=0.01, clock_off_s=off_s, uptime_off_s=uptime_s)
        started.append((worker, off_s))
        return worker

    fleet = Fleet(start, 3, chance)
    begun_ms = chaos_queue.now_ms()
    jobs = {f"job-{number}": make_job(chance, longest=80) for number in range(num_jobs)}
    submit_while(fleet, chaos_queue.producer, jobs, over_s=pause_s * (kills + freezes))
    fleet.fire(kills, freezes, pause_s)
    run_to_the_end(fleet, chaos_queue.producer, progress, limit_s=180)
    fleet.stop()
    found = chaos_queue.judge()
    progress(f"{len(started)} workers with clocks off: {dict(found.reasons)}, {found.num_attempts} attempts")
    assert set(found.reasons) <= {"stop", "length"}, found.errors
    assert found.dead == []
    ended_ms = chaos_queue.now_ms()
    for report in found.reports.values():
        assert all(begun_ms <= attempt.at_ms <= ended_ms + 100 for attempt in report.attempts)
        timing = report.end["timing"] if report.end else {}
        assert all(0 <= value <= ended_ms - begun_ms for value in timing.values()), (timing, report)
    for worker, off_s in started:
        if match := re.search(r"clock=(\d+)", worker.output()):
            assert abs(int(match[1]) - time.time() - off_s) < 1000  # it was off indeed


def test_a_time_limit_is_counted_on_the_servers_clock(chaos_queue: ChaosQueue, spawn: Callable[..., Worker]) -> None:
    for off_s, uptime_s in CLOCKS:
        worker = spawn(chaos_queue, step_time_s=0.05, clock_off_s=off_s, uptime_off_s=uptime_s)
        name = f"off-by-{off_s:.0f}"
        chaos_queue.add(name, prompt="Hello", seed=1, max_tokens=400, ignore_eos=True, timeout_ms=600)
        chaos_queue.wait_empty()
        end = chaos_queue.report(name).end
        assert end is not None
        assert end["reason"] == "deadline"
        assert chaos_queue.num_tokens(name) > 0  # it was not over at once
        worker.stop()
        assert worker.wait() == 0
    found = chaos_queue.judge()
    assert found.reasons == {"deadline": len(CLOCKS)}
