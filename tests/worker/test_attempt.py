"""The table of decisions: what a worker does with an entry, by what the request's stream says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.clients.errors import InvalidJobError
from headrace.clients.events import ErrorInfo, Finished, JobRef
from headrace.worker.attempt import (
    Acknowledge,
    AskWhetherPending,
    Begin,
    Facts,
    HandBack,
    Refusal,
    Rules,
    decide,
    num_charged,
    refusal,
)
from headrace.worker.history import History, PastAttempt

RULES = Rules(max_attempts=3, foreign_model_grace_ms=300_000, too_old_after_ms=82_800_000)
OURS, OTHER = JobRef("p:{q}:jobs", "5-0"), JobRef("p:{q}:jobs:low", "3-0")
SHA = "a" * 64
NOW = 1_000_000


def attempt(**changes: object) -> PastAttempt:
    return replace(PastAttempt(attempt_ms=900_000, job=OURS, seed=1, fingerprint="m"), **changes)  # type: ignore[arg-type]


SETTLED, RELEASED, EMPTY = attempt(num_settled=2), attempt(released=True), attempt()
BOTH = attempt(num_settled=2, released=True)


def facts(*attempts: PastAttempt, **changes: object) -> Facts:
    history = History(newest_id=b"900000-3", fp=SHA, attempts=attempts) if attempts else History()
    made = Facts(job=OURS, payload_sha=SHA, fp=None, history=history, now_ms=NOW, fingerprint="m")
    return replace(made, **changes)  # type: ignore[arg-type]


def terminal(code: str | None = None) -> Finished:
    error = None if code is None else ErrorInfo(code, "words", None)
    return Finished((900_000, 4), "error" if code else "stop", done=True, error=error)


def ended(code: str | None, *attempts: PastAttempt, fp: str = SHA) -> Facts:
    history = History(newest_id=b"900000-4", fp=fp, attempts=attempts, terminal=terminal(code))
    return replace(facts(), history=history)


@pytest.mark.parametrize(
    ("attempts", "charged"),
    [
        ([], 0),
        ([SETTLED] * 7, 0),
        ([RELEASED] * 20, 0),
        ([BOTH] * 20, 0),
        ([EMPTY], 1),
        ([EMPTY, SETTLED, EMPTY], 2),
        ([EMPTY, RELEASED, EMPTY], 2),
        ([SETTLED] * 8, 1),
        ([SETTLED] * 9, 2),
        ([SETTLED] * 7 + [EMPTY], 1),
        ([SETTLED] * 7 + [RELEASED] + [SETTLED] * 7, 0),
        ([SETTLED] * 7 + [RELEASED] + [SETTLED] * 8, 1),
        ([EMPTY] * 3 + [SETTLED] * 5, 4),
    ],
)
def test_which_attempts_are_charged(attempts: list[PastAttempt], charged: int) -> None:
    assert num_charged(tuple(attempts)) == charged


def test_a_fresh_job_is_begun_on_no_stream() -> None:
    assert decide(facts(), RULES) == Begin(attempt_ms=NOW, number=1, base_id=b"", alone=False)


def test_a_job_behind_its_queued_entry_is_begun_on_it() -> None:
    history = History(newest_id=b"0-777", fp=SHA)
    begun = decide(facts(history=history, fp=SHA), RULES)
    assert begun == Begin(attempt_ms=NOW, number=1, base_id=b"0-777", alone=False)


def test_an_attempt_is_above_every_earlier_one_even_if_the_clock_went_back() -> None:
    begun = decide(facts(attempt(attempt_ms=2_000_000, num_settled=1)), RULES)
    assert isinstance(begun, Begin)
    assert begun.attempt_ms == NOW  # the newest id tells: 900000-3
    later = replace(facts(SETTLED), history=History(newest_id=b"2000000-3", fp=SHA, attempts=(SETTLED,)))
    begun = decide(later, RULES)
    assert isinstance(begun, Begin)
    assert (begun.attempt_ms, begun.number) == (2_000_001, 2)


@pytest.mark.parametrize(
    ("code", "attempts", "dead"),
    [
        (None, [SETTLED], False),
        ("invalid_request", [EMPTY], False),
        ("payload_undecodable", [EMPTY], True),
        ("attempts_exhausted", [EMPTY] * 3, True),
        ("attempts_exhausted", [EMPTY, attempt(job=OTHER)], False),  # the other entry's acknowledgement carries it
        ("payload_undecodable", [], False),
    ],
)
def test_what_has_ended_is_acknowledged(code: str | None, attempts: list[PastAttempt], dead: bool) -> None:
    decision = decide(ended(code, *attempts), RULES)
    assert isinstance(decision, Acknowledge)
    assert decision.why == "terminal"
    assert (decision.dead is not None) == dead
    if decision.dead is not None:
        assert decision.dead.code == code


def test_what_was_cancelled_while_queued_is_acknowledged() -> None:
    history = History(newest_id=b"0-778", fp=SHA, terminal=Finished((0, 778), "cancelled", done=True))
    assert decide(facts(history=history, fp=SHA), RULES) == Acknowledge("terminal")


def test_terminal_goes_before_the_fingerprint() -> None:
    decision = decide(ended(None, SETTLED, fp="b" * 64), RULES)
    assert decision == Acknowledge("terminal")


def test_another_requests_stream_is_left_alone() -> None:
    assert decide(facts(SETTLED, payload_sha="b" * 64), RULES) == Acknowledge("foreign")


def test_whether_the_other_entry_is_pending_is_asked_first() -> None:
    other = attempt(job=OTHER, num_settled=1)
    assert decide(facts(other), RULES) == AskWhetherPending(OTHER)
    assert decide(facts(other, other_pending=True), RULES) == Acknowledge("duplicate")
    begun = decide(facts(other, other_pending=False), RULES)
    assert isinstance(begun, Begin)
    assert begun.number == 2


def test_only_the_last_attempts_entry_matters() -> None:
    assert isinstance(decide(facts(attempt(job=OTHER, num_settled=1), SETTLED), RULES), Begin)


def test_a_librarys_job_without_its_stream_is_gone() -> None:
    assert decide(facts(fp=SHA), RULES) == Acknowledge("gone")


def test_another_model_hands_back_for_five_minutes_then_refuses() -> None:
    foreign = attempt(fingerprint="other", num_settled=1, attempt_ms=NOW - 299_999)
    assert decide(facts(foreign), RULES) == HandBack("other")
    late = decide(facts(replace(foreign, attempt_ms=NOW - 300_000)), RULES)
    assert isinstance(late, Begin)
    assert late.refusal is not None
    assert late.refusal.code == "unsupported"


def test_another_model_that_settled_nothing_does_not_matter() -> None:
    assert isinstance(decide(facts(attempt(fingerprint="other", attempt_ms=NOW - 5)), RULES), Begin)
    mixed = decide(facts(SETTLED, attempt(fingerprint="other")), RULES)
    assert isinstance(mixed, Begin)
    assert mixed.refusal is None


@pytest.mark.parametrize(
    ("attempts", "alone", "exhausted"),
    [
        ([], False, False),
        ([EMPTY], False, False),
        ([EMPTY, EMPTY], True, False),
        ([EMPTY, SETTLED, EMPTY], True, False),
        ([EMPTY, RELEASED], False, False),
        ([EMPTY, EMPTY, EMPTY], True, True),
        ([SETTLED] * 10, True, True),
    ],
)
def test_charged_attempts_lead_to_running_alone_and_then_to_the_end(
    attempts: list[PastAttempt], alone: bool, exhausted: bool
) -> None:
    begun = decide(facts(*attempts), RULES)
    assert isinstance(begun, Begin)
    assert begun.alone == alone
    assert (begun.refusal is not None and begun.refusal.code == "attempts_exhausted") == exhausted
    assert (begun.refusal is not None and begun.refusal.dead) == exhausted


def test_max_attempts_is_a_setting() -> None:
    begun = decide(facts(EMPTY), replace(RULES, max_attempts=1))
    assert isinstance(begun, Begin)
    assert begun.refusal is not None


BEGIN = Begin(attempt_ms=NOW, number=1, base_id=b"", alone=False)


def after_begin(begin: Begin = BEGIN, failure: InvalidJobError | None = None, **changes: object) -> Refusal | None:
    known: dict[str, object] = {"cancelled": False, "entry_ms": NOW, "timeout_ms": None, "now_ms": NOW, "rules": RULES}
    return refusal(begin, failure, **{**known, **changes})  # type: ignore[arg-type]


def test_nothing_against_a_good_job() -> None:
    assert after_begin() is None
    assert after_begin(timeout_ms=10, now_ms=NOW + 9) is None
    assert after_begin(now_ms=NOW + 82_800_000) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cancelled": True}, "cancelled"),
        ({"timeout_ms": 10, "now_ms": NOW + 10}, "deadline"),
        ({"now_ms": NOW + 82_800_001}, "deadline"),
        ({"cancelled": True, "now_ms": NOW + 82_800_001}, "cancelled"),
    ],
)
def test_cancelled_and_out_of_time(changes: dict[str, object], reason: str) -> None:
    refused = after_begin(**changes)
    assert refused is not None
    assert refused.reason == reason
    assert not refused.dead


@pytest.mark.parametrize(("code", "dead"), [("payload_undecodable", True), ("invalid_request", False)])
def test_a_failure_to_decode_is_told_before_anything_else_is_looked_at(code: str, dead: bool) -> None:
    refused = after_begin(failure=InvalidJobError(code, "words", "top_p"), cancelled=True)
    assert refused == Refusal("error", code, "words", "top_p")
    assert refused.dead == dead


def test_what_the_decision_knew_already_goes_first() -> None:
    known = Refusal("error", "attempts_exhausted", "words")
    assert after_begin(replace(BEGIN, refusal=known), InvalidJobError("invalid_request", "words")) == known
