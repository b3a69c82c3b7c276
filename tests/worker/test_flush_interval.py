"""`flush_interval_s`: a request's tokens are joined; nothing else is held up, and nothing held back is ever lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.clients.entries import decode
from headrace.clients.events import Finished, Released, Tokens
from headrace.engine.choice_text import ChoiceText
from headrace.engine.stop_strings import StopMatcher
from headrace.engine.types import ChoiceOutput
from headrace.worker.answer import Answer, AnswerChoice, Times
from headrace.worker.options import WorkerSettings
from tests.support.rig import Rig
from tests.support.scripted import ByteTokenizer
from tests.support.worker_process import WorkerProcess, wait_until
from tests.worker.test_cancel import set_flag
from tests.worker.test_recovery import logprobs

JOB = {"prompt": "Hello", "max_tokens": 60, "seed": 5, "ignore_eos": True}
LONG = {**JOB, "max_tokens": 1000}
NEVER_S = 10.0  # the longest interval: longer than any test, so that nothing comes out by itself


def chunks(rig: Rig, request_id: str) -> list[Tokens]:
    return [event for event in rig.events(request_id) if isinstance(event, Tokens)]


def said(rig: Rig, request_id: str) -> dict[int, Any]:
    told = rig.told(request_id).items()
    return {index: (each.token_ids, each.text, each.finished and each.finished.reason) for index, each in told}


@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"logprobs": 2, "prompt_logprobs": 1}, {"temperature": 0}])
def test_at_most_one_entry_in_an_interval_and_the_same_answer(rig: Rig, extra: dict[str, Any]) -> None:
    interval_s = 0.1
    worker = rig.worker(step_time_s=0.01, flush_interval_s=interval_s)
    rig.add("joined", {**JOB, **extra})
    wait_until(lambda: chunks(rig, "joined"))
    begun_s = time.monotonic()
    rig.wait_done("joined")
    num_intervals = (time.monotonic() - begun_s) / interval_s
    assert worker.stop() == 0
    rig.worker()
    rig.add("apart", {**JOB, **extra})
    rig.wait_done("apart")
    assert said(rig, "joined") == said(rig, "apart")
    assert logprobs(rig, "joined") == logprobs(rig, "apart")
    for choice in range(extra.get("n", 1)):
        joined = [each for each in chunks(rig, "joined") if each.choice == choice]
        # one at once, one more for each whole interval
        assert 2 < len(joined) <= 2 + num_intervals
        assert len([each for each in chunks(rig, "apart") if each.choice == choice]) == 59


@pytest.mark.parametrize("kind", ["json", "job"])
def test_the_first_token_of_each_choice_goes_out_at_once(rig: Rig, kind: str) -> None:
    worker = rig.worker(step_time_s=0.02, flush_interval_s=NEVER_S)
    rig.add("my-1", {**LONG, "n": 2}, kind=kind)
    wait_until(lambda: len(chunks(rig, "my-1")) == 2, 1.0)
    wait_until(lambda: worker.engine.step_count > 20)
    first, second = chunks(rig, "my-1")
    assert [(each.choice, each.index, len(each.token_ids)) for each in (first, second)] == [(0, 0, 1), (1, 0, 1)]
    set_flag(rig, "my-1")
    rig.wait_done("my-1")


def test_what_is_held_back_comes_out_with_the_cancellation(rig: Rig) -> None:
    worker = rig.worker(step_time_s=0.01, flush_interval_s=NEVER_S)
    rig.add("my-1", {**LONG, "n": 2})
    wait_until(lambda: worker.engine.step_count > 20)
    set_flag(rig, "my-1")
    begun_s = time.monotonic()
    last = rig.wait_done("my-1", timeout_s=2)
    # asked every quarter of a second, then two steps
    assert time.monotonic() - begun_s < 0.25 + 0.25
    ends = [event for event in rig.events("my-1") if isinstance(event, Finished)]
    assert [(each.reason, each.choice, each.index) for each in ends] == [("cancelled", 0, 1), ("cancelled", 1, 1)]
    assert all(len(each.token_ids) > 15 for each in ends)
    assert last.usage is not None
    assert last.usage.completion == rig.num_tokens("my-1")


def test_what_is_held_back_comes_out_at_the_time_limit(rig: Rig) -> None:
    rig.worker(step_time_s=0.01, flush_interval_s=NEVER_S)
    rig.add("my-1", {**LONG, "timeout_ms": 400})
    assert rig.wait_done("my-1", timeout_s=2).reason == "deadline"
    assert rig.num_tokens("my-1") > 10


def test_an_answer_that_is_not_streamed_stays_one_entry(rig: Rig) -> None:
    rig.worker(step_time_s=0.002, flush_interval_s=0.01)
    rig.add("my-1", {**JOB, "stream": False})
    assert len(rig.wait_done("my-1").token_ids) == 60
    assert chunks(rig, "my-1") == []


def test_what_is_held_back_goes_before_a_hand_over(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    first = start_worker(rig.server, rig.prefix, step_time_s=0.02, flush_interval_s=NEVER_S, drain_timeout_s=60.0)
    rig.add("my-1", LONG | {"max_tokens": 200})
    rig.wait_tokens("my-1", 1)
    time.sleep(0.5)
    first.stop(times=2)
    assert first.wait() == 0
    _, one, held, released = rig.events("my-1")
    assert isinstance(one, Tokens)
    assert isinstance(held, Tokens)
    assert isinstance(released, Released)
    assert held.index == 1
    assert len(held.token_ids) > 10
    rig.worker()
    rig.wait_done("my-1")
    assert rig.started("my-1")[1].resumed == (1 + len(held.token_ids),)
    assert rig.num_tokens("my-1") == 200


KILLED: dict[str, tuple[str, dict[str, Any]]] = {
    "seeded": ("hash", {"temperature": 0.9}),
    "greedy": ("hash", {"temperature": 0}),
    "stop string": ("echo", {"prompt": "one two three four five", "stop": ["four fi"], "ignore_eos": False}),
    "characters of several tokens": ("echo", {"prompt": "né 世界 👩‍👩‍👧 " * 3, "ignore_eos": False}),
    "log-probabilities": ("hash", {"logprobs": 2, "prompt_logprobs": 1}),
    "three choices": ("hash", {"n": 3}),
}


@pytest.mark.parametrize("case", KILLED)
def test_killed_while_it_holds_chunks_back_the_answer_is_the_same(
    start_worker: Callable[..., WorkerProcess], rig: Rig, case: str
) -> None:
    script, extra = KILLED[case]
    options: dict[str, Any] = {"script": script, "lease_s": 0.6, "flush_interval_s": 0.15}
    first = start_worker(rig.server, rig.prefix, step_time_s=0.02, **options)
    rig.add("my-1", {**JOB, **extra})
    num_choices = extra.get("n", 1)
    wait_until(lambda: len(chunks(rig, "my-1")) >= 2 * num_choices)
    time.sleep(0.08)  # half an interval: about four tokens are held back
    first.kill()
    published = said(rig, "my-1")
    rig.worker(**options)
    rig.wait_done("my-1")
    assert rig.started("my-1")[1].resumed == tuple(len(published[choice][0]) for choice in range(num_choices))
    rig.add("whole", {**JOB, **extra})
    rig.wait_done("whole")
    assert said(rig, "my-1") == said(rig, "whole")
    assert logprobs(rig, "my-1") == logprobs(rig, "whole")


def test_who_was_overtaken_keeps_what_it_held_back_to_itself(
    start_worker: Callable[..., WorkerProcess], rig: Rig
) -> None:
    first = start_worker(rig.server, rig.prefix, step_time_s=0.02, lease_s=0.6, flush_interval_s=0.3)
    rig.add("my-1", JOB)
    rig.wait_tokens("my-1", 2)
    time.sleep(0.1)
    first.freeze()
    rig.worker(lease_s=0.6, flush_interval_s=0.05)
    rig.wait_done("my-1")
    before = rig.raw("my-1")
    first.thaw()
    wait_until(lambda: "event=fenced" in first.output() or "lost the lease" in first.output())
    time.sleep(0.5)
    assert rig.raw("my-1") == before
    assert rig.num_tokens("my-1") == 60


def test_an_answer_gives_what_it_holds_once_and_counts_all_of_it() -> None:
    def outputs(text: str, first: int) -> list[ChoiceOutput]:
        return [ChoiceOutput("r", 0, first + at, (byte,)) for at, byte in enumerate(text.encode())]

    text = ChoiceText(ByteTokenizer().detokenizer(), StopMatcher(("five",)))
    answer = Answer("d", True, False, [AnswerChoice(text)], Times(0), holds_back=True)
    at_once = [answer.feed(output, 0.0).payload for output in outputs("four f", 0)]
    assert [payload is None for payload in at_once] == [False] + [True] * 5
    [(payload, num_tokens)] = answer.take_held()
    assert num_tokens == 5
    # an "f" may begin the stop string: its id goes out, its text only once that is ruled out
    assert decode("1-2", {b"d": payload}) == Tokens((1, 2), 1, tuple(b"our f"), "four ")
    assert answer.take_held() == []
    *held, last = [answer.feed(output, 0.0) for output in outputs("ive", 6)]
    assert [each.payload for each in held] == [None, None]
    assert last.stop_found
    finished = decode("1-3", {b"d": last.payload or b""})
    assert isinstance(finished, Finished)
    assert (finished.index, finished.token_ids, finished.text, finished.stop) == (6, tuple(b"ive"), "", "five")
    assert finished.usage is not None
    assert finished.usage.completion == 9
    assert answer.take_held() == []


@pytest.mark.parametrize("interval_s", [-0.1, 10.1])
def test_an_interval_that_makes_no_sense_is_refused(interval_s: float) -> None:
    with pytest.raises(ValueError, match="flush_interval_s"):
        WorkerSettings(flush_interval_s=interval_s)
