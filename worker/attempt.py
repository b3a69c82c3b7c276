"""What to do with a job entry, decided from what its stream says: pure functions, one table of rules.

`decide` looks before `started` is written, `refusal` after it. The rules and their order are those of docs/protocol.md,
"A worker", 2 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ..clients.errors import InvalidJobError
from ..clients.events import ErrorInfo, JobRef
from .history import History, PastAttempt

EIGHTH: Final = 8  # as many attempts in a row without `released` are charged even if they settled tokens
ALONE_AFTER: Final = 2  # charged attempts after which a request is run apart from all others
UNDECODABLE: Final = "payload_undecodable"
EXHAUSTED: Final = "attempts_exhausted"
TO_DEAD: Final = frozenset({UNDECODABLE, EXHAUSTED})  # the jobs that end with these also go to the dead-letter stream


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings that decisions depend on."""

    max_attempts: int
    foreign_model_grace_ms: int
    too_old_after_ms: int


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known of an entry when its stream has been read."""

    job: JobRef
    payload_sha: str
    fp: str | None  # the entry's own field
    history: History
    now_ms: int  # server's clock
    fingerprint: str  # of this worker's model
    other_pending: bool | None = None  # is the last attempt's entry, if another, still pending? None: not asked


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a request ends without being run: an error, or `cancelled`, or `deadline`."""

    reason: Literal["error", "cancelled", "deadline"]
    code: str = ""  # of an error
    message: str = ""
    param: str | None = None

    @property
    def dead(self) -> bool:
        """Whether the job also goes to the dead-letter stream."""
        return self.code in TO_DEAD


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Nothing is left to do for this entry."""

    why: Literal["terminal", "foreign", "duplicate", "gone"]
    dead: ErrorInfo | None = None  # set: with a copy to the dead-letter stream, for this reason


@dataclass(frozen=True, slots=True)
class AskWhetherPending:
    """The last attempt came from another entry: look whether that one is pending, then decide again."""

    job: JobRef


@dataclass(frozen=True, slots=True)
class HandBack:
    """Begun with another model, by which it may still be continued: leave it to a worker that has it."""

    fingerprint: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Write `started`."""

    attempt_ms: int  # the A of its ids
    number: int  # 1, 2, …
    base_id: bytes  # the newest id of the stream; empty if there is none
    alone: bool  # only while no other sequence is begun here
    refusal: Refusal | None = None  # already clear now; written after `started`


Decision = Acknowledge | AskWhetherPending | HandBack | Begin


def num_charged(attempts: tuple[PastAttempt, ...]) -> int:
    """How many of the attempts count against `max_attempts`."""
    charged = in_a_row = 0
    for attempt in attempts:
        in_a_row = 0 if attempt.released else in_a_row + 1
        if not attempt.released and (attempt.num_settled == 0 or in_a_row >= EIGHTH):
            charged += 1
    return charged


def decide(facts: Facts, rules: Rules) -> Decision:
    """What to do with an entry whose stream has been read."""
    history = facts.history
    last = history.attempts[-1] if history.attempts else None
    from_other = last is not None and last.job != facts.job
    if history.terminal is not None:
        error = history.terminal.error
        ends_dead = error is not None and error.code in TO_DEAD and last is not None and not from_other
        return Acknowledge("terminal", dead=error if ends_dead else None)
    if history.newest_id and history.fp != facts.payload_sha:
        return Acknowledge("foreign")
    if last is not None and from_other:
        if facts.other_pending is None:
            return AskWhetherPending(last.job)
        if facts.other_pending:
            return Acknowledge("duplicate")
    if facts.fp is not None and not history.newest_id:
        return Acknowledge("gone")
    return _begin_or_leave(facts, rules)


def _begin_or_leave(facts: Facts, rules: Rules) -> Decision:
    history = facts.history
    charged = num_charged(history.attempts)
    refusal = None
    settled_by = next((each for each in reversed(history.attempts) if each.num_settled), None)
    if settled_by is not None and settled_by.fingerprint != facts.fingerprint:
        if facts.now_ms < settled_by.attempt_ms + rules.foreign_model_grace_ms:
            return HandBack(settled_by.fingerprint)
        message = "begun with another model, which no worker of this queue has had for minutes"
        refusal = Refusal("error", "unsupported", message)
    if charged >= rules.max_attempts:
        refusal = Refusal("error", EXHAUSTED, f"given up after {charged} charged attempts")
    return Begin(
        attempt_ms=max(facts.now_ms, history.newest_ms + 1),
        number=len(history.attempts) + 1,
        base_id=history.newest_id,
        alone=charged >= ALONE_AFTER,
        refusal=refusal,
    )


def refusal(
    begin: Begin,
    failure: InvalidJobError | None,
    *,
    cancelled: bool,
    entry_ms: int,
    timeout_ms: int | None,
    now_ms: int,
    rules: Rules,
) -> Refusal | None:
    """Whether a request ends right behind its `started`: looked at in this order, and only then."""
    if begin.refusal is not None:
        return begin.refusal
    if failure is not None:
        return Refusal("error", failure.code, failure.message, failure.param)
    if cancelled:
        return Refusal("cancelled")
    age_ms = now_ms - entry_ms
    if age_ms > rules.too_old_after_ms or (timeout_ms is not None and age_ms >= timeout_ms):
        return Refusal("deadline")
    return None
