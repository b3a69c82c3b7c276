"""SIGTERM: finish what runs, hand over what does not get done, leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.clients.events import Finished, Released, Started
from tests.support.rig import Rig
from tests.support.scripted import ByteTokenizer
from tests.support.worker_process import WorkerProcess, wait_until

LONG = {"prompt": "Hello", "max_tokens": 60, "seed": 5, "ignore_eos": True}


def consumers(rig: Rig) -> set[str]:
    return {
        consumer["name"].decode()
        for key in rig.keys.all_jobs
        if rig.client.exists(key)
        for consumer in rig.client.xinfo_consumers(key, "workers")
    }


def test_what_runs_is_finished_and_nothing_more_is_taken(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    worker = start_worker(rig.server, rig.prefix, step_time_s=0.01)
    rig.add("running", LONG)
    rig.wait_tokens("running", 2)
    worker.stop()
    time.sleep(0.1)
    rig.add("late", LONG)
    assert worker.wait() == 0
    assert rig.is_done("running")
    assert rig.raw("late") == []
    assert consumers(rig) == set()
    assert not list(rig.client.scan_iter(rig.keys.worker_pattern))


def test_after_the_limit_the_rest_is_handed_over_within_a_second(
    start_worker: Callable[..., WorkerProcess], rig: Rig
) -> None:
    first = start_worker(rig.server, rig.prefix, step_time_s=0.05, drain_timeout_s=0.3, lease_s=30.0)
    rig.add("my-1", LONG)
    rig.wait_tokens("my-1", 3)
    second = rig.worker(lease_s=30.0, step_time_s=0.001)
    first.stop()
    assert first.wait() == 0
    ended_s = time.monotonic()
    wait_until(lambda: len(rig.started("my-1")) == 2, 3)
    assert time.monotonic() - ended_s < 1.2
    rig.wait_done("my-1")
    kinds = [type(event) for event in rig.events("my-1")]
    assert kinds.count(Released) == 1
    assert kinds[kinds.index(Released) + 1] is Started
    assert rig.num_tokens("my-1") == 60
    assert rig.started("my-1")[1].worker == second.name
    assert rig.dead() == []


def test_a_second_signal_hands_back_at_once(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    worker = start_worker(rig.server, rig.prefix, step_time_s=0.05, drain_timeout_s=60.0)
    rig.open_ids.add("my-1")
    rig.add("my-1", LONG)
    rig.wait_tokens("my-1", 3)
    begun_s = time.monotonic()
    worker.stop(times=2)
    assert worker.wait() == 0
    assert time.monotonic() - begun_s < 1.0
    assert isinstance(rig.last("my-1"), Released)
    [entry] = rig.pending()
    assert entry["consumer"] == b"-"
    assert entry["time_since_delivered"] > 86_400_000
    assert consumers(rig) == {"-"}


def test_handing_over_often_charges_nothing(rig: Rig) -> None:
    """Ten workers in a row are told to stop in the prefill: the job is neither given up nor run apart."""
    from tests.support.scripted import ScriptedRunner

    rig.add("my-1", {"prompt": "x" * 1500, "max_tokens": 3, "ignore_eos": True})
    for number in range(10):
        runner = ScriptedRunner(num_blocks=512, max_model_len=2048, step_time_s=0.1)
        worker = rig.worker(runner=runner, drain_timeout_s=0.0, lease_s=30.0)
        wait_until(lambda count=number: len(rig.started("my-1")) == count + 1)
        worker.stop()
    rig.worker(lease_s=30.0)
    rig.wait_done("my-1")
    assert len(rig.started("my-1")) == 11
    assert rig.num_tokens("my-1") == 3


def test_what_has_not_begun_is_handed_back_without_a_word(rig: Rig) -> None:
    """It waits for its turn behind nothing: after two charged attempts it is held, not begun."""
    from tests.support.rig import abandon

    abandon(rig, "suspect")
    rig.open_ids.add("suspect")
    charge(rig, "suspect", 2)
    rig.add("running", {**LONG, "max_tokens": 500})
    rig.open_ids.add("running")
    worker = rig.worker(step_time_s=0.02, lease_s=30.0, drain_timeout_s=60)
    rig.wait_tokens("running", 1)
    wait_until(lambda: len(worker.service.context.memory) == 2)
    before = rig.raw("suspect")
    assert worker.stop(2) == 0
    assert rig.raw("suspect") == before
    assert {entry["consumer"] for entry in rig.pending()} == {b"-"}


def charge(rig: Rig, request_id: str, times: int) -> None:
    """Write the `started` of attempts that ended without a token, on behalf of the request's one pending entry."""
    import hashlib
    import json

    [(entry_id, fields)] = [
        each for each in rig.client.xrange(rig.keys.jobs()) if each[1][b"id"].decode() == request_id
    ]
    fp = hashlib.sha256(fields[b"json"]).hexdigest()
    for number in range(times):
        event = {
            "e": "started", "attempt": number + 1, "worker": "dead", "job": f"{rig.keys.jobs()} {entry_id.decode()}",
            "resumed": [0], "seed": 3, "fp": fp, "model": {"name": "scripted", "fingerprint": "f" * 64},
        }  # fmt: skip
        rig.client.xadd(rig.keys.out(request_id), {"json": json.dumps(event)}, id=f"{1000 + number}-0")
    rig.client.pexpire(rig.keys.out(request_id), 86_400_000)


def test_a_cancellation_during_the_drain_wins(rig: Rig) -> None:
    worker = rig.worker(step_time_s=0.05, drain_timeout_s=20)
    rig.add("my-1", LONG)
    rig.wait_tokens("my-1", 2)
    worker.control.request_stop()
    rig.client.set(rig.keys.cancel("my-1"), "1", px=86_400_000)
    assert worker.wait() == 0
    last = rig.last("my-1")
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"


def test_a_stop_while_the_prompt_is_prepared(rig: Rig) -> None:
    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            time.sleep(0.5)
            return super().encode(text)

    worker = rig.worker(tokenizer=SlowTokenizer())
    rig.open_ids.add("my-1")
    rig.add("my-1", LONG)
    wait_until(lambda: rig.started("my-1"))
    assert worker.stop(2) == 0
    assert [type(event) for event in rig.events("my-1")] == [Started, Released]


def test_an_idle_worker_stops_without_waiting_for_its_read(rig: Rig) -> None:
    worker = rig.worker()
    time.sleep(0.15)
    begun_s = time.monotonic()
    assert worker.stop() == 0
    assert time.monotonic() - begun_s < 0.5


def test_a_job_that_arrives_while_the_read_is_given_up_is_handed_back(rig: Rig) -> None:
    """Twenty times: a job is added in the very moment in which the worker is told to stop. None is lost or stuck."""
    for number in range(20):
        worker = rig.worker(lease_s=60.0, drain_timeout_s=0.0)
        time.sleep(0.02)
        worker.control.request_stop()
        rig.add(f"my-{number}", {"prompt": "x", "max_tokens": 1})
        worker.wait()
        assert {entry["consumer"] for entry in rig.pending()} <= {b"-"}
    rig.worker(lease_s=60.0)
    rig.wait_done(*rig.submitted, timeout_s=5)


def test_a_failing_engine_hands_everything_over(rig: Rig) -> None:
    from tests.support.scripted import ScriptedRunner

    runner = ScriptedRunner(num_blocks=512, max_model_len=2048, fail_steps=range(5, 1000))
    first = rig.worker(runner=runner, lease_s=60.0)
    rig.add("my-1", LONG)
    assert first.wait() == 1
    assert isinstance(rig.last("my-1"), Released)
    assert first.counters.engine_errors == 3
    rig.worker(lease_s=60.0)
    rig.wait_done("my-1", timeout_s=3)
    assert rig.num_tokens("my-1") == 60


def test_a_step_that_fails_once_is_run_again(rig: Rig) -> None:
    from tests.support.scripted import ScriptedRunner

    runner = ScriptedRunner(num_blocks=512, max_model_len=2048, fail_steps=[5])
    worker = rig.worker(runner=runner)
    rig.add("my-1", LONG)
    rig.wait_done("my-1")
    assert worker.counters.engine_errors == 1
    assert len(rig.started("my-1")) == 1


def test_a_stop_with_the_server_out_of_reach_ends_all_the_same(
    start_worker: Callable[..., WorkerProcess], own_server: Callable[..., object], rig_on: Callable[..., Rig]
) -> None:
    server = own_server()
    rig = rig_on(server)
    rig.check_at_end = False
    worker = start_worker(server, rig.prefix, step_time_s=0.02, socket_timeout_s=0.5, drain_timeout_s=0.0)
    rig.add("my-1", LONG)
    rig.wait_tokens("my-1", 2)
    server.kill()  # type: ignore[attr-defined]
    worker.stop(times=2)
    assert worker.wait(12) == 0
