"""A bare job that comes for the first time has no stream, so it is begun without reading it; if it has, it is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from headrace.engine.types import Plan, RowResult
from headrace.worker.clock import ServerClock
from tests.support.rig import Rig, abandon
from tests.support.scripted import ScriptedRunner
from tests.support.worker_process import wait_until

JOB = {"prompt": "Hello", "max_tokens": 5, "seed": 3, "ignore_eos": True}


def commands_about(rig: Rig, request_id: str, *, bare: bool) -> list[str]:
    """The first words of what the worker sends about a request's stream until it has ended."""
    with rig.client.monitor() as monitor:
        (rig.add if bare else rig.submit)(request_id, JOB)
        rig.wait_done(request_id)
        rig.client.echo("the end")
        said = []
        for command in monitor.listen():
            if command["command"] == "ECHO the end":
                return said
            # Lua's own are not the worker's; the test asks for the stream's end only
            if f"{{{request_id}}}:out" in command["command"] and command["client_type"] != "lua":
                said.append(command["command"])
    return said


def reads(said: list[str]) -> int:
    return sum(each.startswith("XRANGE") and each.endswith("COUNT 500") for each in said)


def keep_clock_fresh(rig: Rig) -> None:
    """One request that reads the server's clock with its stream."""
    rig.submit("clock", JOB)
    rig.wait_done("clock")


def test_a_bare_job_is_begun_unread(rig: Rig) -> None:
    rig.worker(step_time_s=0.002)
    keep_clock_fresh(rig)
    assert reads(commands_about(rig, "bare", bare=True)) == 0
    assert reads(commands_about(rig, "library", bare=False)) == 1
    assert [each.attempt for each in rig.started("bare")] == [1]


def test_a_job_without_an_age_of_the_clock_is_read_first() -> None:
    clock = ServerClock()
    assert not clock.is_fresh(time.monotonic())
    clock.set([b"1700000000", b"0"], 100.0)
    assert clock.is_fresh(100.5)
    assert not clock.is_fresh(101.5)


def test_a_second_bare_job_of_an_answered_request_changes_nothing(rig: Rig) -> None:
    worker = rig.worker()
    rig.add("my-1", JOB)
    rig.wait_done("my-1")
    before = rig.raw("my-1")
    keep_clock_fresh(rig)
    rig.add("my-1", JOB)
    rig.wait_empty()
    assert rig.raw("my-1") == before
    assert worker.counters.attempts == 2  # of my-1 and of the other


def test_a_second_bare_job_of_a_running_request_is_a_duplicate(rig: Rig) -> None:
    worker = rig.worker(step_time_s=0.02)
    keep_clock_fresh(rig)
    rig.add("my-1", {**JOB, "max_tokens": 30})
    rig.wait_tokens("my-1", 2)
    rig.add("my-1", {**JOB, "max_tokens": 30})
    wait_until(lambda: worker.counters.duplicates == 1)
    rig.wait_done("my-1")
    assert len(rig.started("my-1")) == 1
    assert rig.num_tokens("my-1") == 30


class Watching(ScriptedRunner):
    """Notes, whenever a step is launched, how many tokens of a request its stream holds."""

    def __init__(self, rig: Rig, request_id: str) -> None:
        super().__init__(script="hash", num_blocks=64, max_model_len=256)
        self._rig, self._request_id = rig, request_id
        self.written: list[int] = []

    def launch(self, plan: Plan) -> Callable[[], list[RowResult]]:
        self.written.append(self._rig.num_tokens(self._request_id))
        return partial(self.run, plan)


def test_a_first_token_waits_for_no_further_step(rig: Rig) -> None:
    runner = Watching(rig, "my-1")
    rig.worker(runner=runner)
    rig.submit("my-1", JOB)
    rig.wait_done("my-1")
    assert runner.written[:2] == [0, 1]


def test_what_another_worker_left_is_read(rig: Rig) -> None:
    """An abandoned job is not new, though nothing but its attempt says so."""
    abandon(rig, "my-1")
    rig.worker()
    rig.wait_done("my-1")
    assert rig.num_tokens("my-1") > 0


def test_attempts_begun_at_once_have_ids_of_their_own(rig: Rig) -> None:
    """Two entries of one request could not be told apart by a failover's survivor."""
    for number in range(30):
        rig.add(f"my-{number}", {"prompt": "Hello", "max_tokens": 1})
    rig.worker()
    rig.wait_done(*rig.submitted)
    assert len({rig.started(each)[0].id[0] for each in rig.submitted}) == 30
