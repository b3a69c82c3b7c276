"""Cancelling, before and while a request runs; time limits."""

from __future__ import annotations

import hashlib
import json
import time

from headrace.clients.events import Finished, Queued, Started
from headrace.worker import lua
from tests.support.rig import Rig
from tests.support.scripted import ByteTokenizer, ScriptedRunner
from tests.support.worker_process import wait_until

LONG = {"prompt": "Hello", "max_tokens": 1000, "ignore_eos": True}


def set_flag(rig: Rig, request_id: str) -> None:
    rig.client.set(rig.keys.cancel(request_id), "1", px=86_400_000)


def test_a_running_request_is_cancelled_within_two_steps(rig: Rig) -> None:
    worker = rig.worker(step_time_s=0.05)
    rig.add("my-1", LONG)
    rig.wait_tokens("my-1", 2)
    before = rig.num_tokens("my-1")
    set_flag(rig, "my-1")
    finished = rig.wait_done("my-1", timeout_s=2)
    assert finished.reason == "cancelled"
    assert finished.usage is not None
    assert finished.usage.completion <= before + 3
    wait_until(lambda: not worker.engine.has_work)
    worker.engine.check()
    assert not rig.client.exists(rig.keys.cancel("my-1"))


def test_a_request_that_appends_nothing_is_asked_every_quarter_of_a_second(rig: Rig) -> None:
    rig.worker(step_time_s=0.02)
    rig.add("my-1", {**LONG, "stream": False})
    wait_until(lambda: rig.started("my-1"))
    time.sleep(0.3)
    set_flag(rig, "my-1")
    begun_s = time.monotonic()
    finished = rig.wait_done("my-1")
    assert time.monotonic() - begun_s < 0.25 + 0.25
    assert finished.reason == "cancelled"
    assert len(finished.token_ids) > 5


def test_cancel_in_prefill(rig: Rig) -> None:
    """A prompt of many chunks: the flag is seen before the first token."""
    runner = ScriptedRunner(num_blocks=512, max_model_len=4096, step_time_s=0.2)
    rig.worker(runner=runner)
    rig.add("my-1", {"prompt": "x" * 3500, "max_tokens": 5})
    wait_until(lambda: rig.started("my-1"))
    set_flag(rig, "my-1")
    finished = rig.wait_done("my-1")
    assert finished.reason == "cancelled"
    assert rig.num_tokens("my-1") == 0


def test_cancel_ends_every_open_choice(rig: Rig) -> None:
    rig.worker(step_time_s=0.02)
    rig.add("my-1", {**LONG, "n": 3})
    rig.wait_tokens("my-1", 6)
    set_flag(rig, "my-1")
    rig.wait_done("my-1")
    finished = [event for event in rig.events("my-1") if isinstance(event, Finished)]
    assert [(event.choice, event.reason, event.done) for event in finished] == [
        (0, "cancelled", False),
        (1, "cancelled", False),
        (2, "cancelled", True),
    ]


def test_held_back_text_comes_out_with_the_cancellation(rig: Rig) -> None:
    """The engine echoes half of a stop string and is then held up: the text must not be lost."""
    runner = ScriptedRunner(script=[97] * 500, num_blocks=64, step_time_s=0.02, max_model_len=512)
    rig.worker(runner=runner)
    rig.add("my-1", {"prompt": "x", "stop": ["a" * 400], "max_tokens": 500})
    rig.wait_tokens("my-1", 3)
    assert rig.told("my-1")[0].text == ""
    set_flag(rig, "my-1")
    rig.wait_done("my-1")
    choice = rig.told("my-1")[0]
    assert choice.text == "a" * len(choice.token_ids)


def test_a_flag_set_before_the_first_attempt_ends_it_at_once(rig: Rig) -> None:
    set_flag(rig, "my-1")
    rig.add("my-1", LONG)
    rig.worker()
    rig.wait_done("my-1")
    started, finished = rig.events("my-1")
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert finished.reason == "cancelled"


def test_a_job_cancelled_while_queued_never_starts(rig: Rig) -> None:
    """As a client library does it: `finished` by compare-and-append on `queued`."""
    payload = json.dumps(LONG).encode()
    fp, out, now = hashlib.sha256(payload).hexdigest(), rig.keys.out("my-1"), int(time.time() * 1000)
    rig.client.script_load(lua.APPEND.source)
    for previous, entry_id, event in (
        (b"", f"0-{now}", {"e": "queued", "fp": fp}),
        (f"0-{now}".encode(), f"0-{now + 1}", {"e": "finished", "reason": "cancelled", "done": True}),
    ):
        command = lua.call(
            lua.APPEND,
            (out, rig.keys.cancel("my-1")),
            (previous, entry_id, "json", json.dumps(event), 600_000, b"0"),
        )
        assert rig.client.execute_command(*command)[0] == 1
    rig.add("my-1", payload, fields={"fp": fp})
    worker = rig.worker()
    rig.wait_empty()
    assert [type(event) for event in rig.events("my-1")] == [Queued, Finished]
    assert worker.counters.attempts == 0


def test_cancel_while_the_prompt_is_prepared(rig: Rig) -> None:
    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            time.sleep(1.0)
            return super().encode(text)

    worker = rig.worker(tokenizer=SlowTokenizer())
    rig.add("my-1", LONG)
    wait_until(lambda: rig.started("my-1"))
    set_flag(rig, "my-1")
    begun_s = time.monotonic()
    assert rig.wait_done("my-1").reason == "cancelled"
    assert time.monotonic() - begun_s < 0.9
    time.sleep(1.0)  # the late result must not do anything
    assert not worker.engine.has_work


def test_a_neighbour_does_not_wait_for_a_slow_prompt(rig: Rig) -> None:
    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            if text.startswith("slow"):
                time.sleep(1.0)
            return super().encode(text)

    rig.worker(tokenizer=SlowTokenizer(), prepare_timeout_s=0.3)
    rig.add("slow-1", {"prompt": "slow", "max_tokens": 2})
    rig.add("quick", {"prompt": "quick", "max_tokens": 2})
    begun_s = time.monotonic()
    rig.wait_done("quick")
    assert time.monotonic() - begun_s < 0.25
    finished = rig.wait_done("slow-1")
    assert finished.error is not None
    assert finished.error.code == "internal"


def test_a_time_limit_counts_from_the_jobs_entry(rig: Rig) -> None:
    rig.worker(step_time_s=0.02)
    rig.add("my-1", {**LONG, "timeout_ms": 300})
    finished = rig.wait_done("my-1", timeout_s=2)
    assert finished.reason == "deadline"
    assert finished.usage is not None
    assert 3 <= finished.usage.completion <= 20


def test_a_time_limit_that_is_over_before_the_begin(rig: Rig) -> None:
    rig.add("my-1", {**LONG, "timeout_ms": 50})
    time.sleep(0.1)
    rig.worker()
    rig.wait_done("my-1")
    assert [type(event) for event in rig.events("my-1")] == [Started, Finished]
    assert rig.last("my-1").reason == "deadline"  # type: ignore[union-attr]


def test_a_job_almost_as_old_as_its_stream_may_get_is_not_run(rig: Rig) -> None:
    too_old_ms = int(time.time() * 1000) - (86_400_000 - 3_600_000) - 5_000
    rig.add("old", LONG, entry_id=f"{too_old_ms}-0", priority="low")
    rig.add("young", {"prompt": "x", "max_tokens": 1}, entry_id=f"{too_old_ms + 60_000}-0", priority="high")
    rig.worker()
    assert rig.wait_done("old").reason == "deadline"
    assert rig.wait_done("young").reason in {"length", "stop"}
