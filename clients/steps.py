"""What the client does, as steps without I/O: generators that yield commands and are sent the replies.

Both clients run the same steps, one waiting, one awaiting. A reply that did not come is thrown in as LostReplyError:
the command may have been carried out or not. Nothing here is a guess about which: every write is compare-and-append,
or harmless if done twice, and after a lost reply the stream is read again.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import SystemRandom
from typing import Any, Final

from . import replies
from .entries import decode, encode, format_id, to_map
from .errors import ConflictError, MalformedEntryError, QueueFullError, UnavailableError
from .events import EntryId, Finished, Queued, Started, Usage
from .keys import GROUP, Keys
from .lua import APPEND, CANCEL, Script
from .payload import Kind
from .submission import Submission

RETRY_QUEUED_AFTER_MS: Final = 10_000  # a `queued` this old whose job is nowhere to be seen gets its job again
MAX_BLOCK_MS: Final = 2_000
_MAX_MISSES: Final = 3  # looks at a stream that has gone on before each act; then the server is to look for itself
BACKOFF_S: Final = (0.05, 2.0)  # first and longest pause between two tries, before jitter
_RANDOM = SystemRandom()


class LostReplyError(Exception):
    """No reply came, or one that says "not now": `reason` in words. Thrown into the steps, never out of a client."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Command:
    """A command; `key` tells the node in a cluster."""

    key: str
    args: tuple[str | bytes | int, ...]


@dataclass(frozen=True, slots=True)
class RunScript:
    """A script on the keys of one request."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[str | bytes | int, ...]


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so long before going on."""

    seconds: float


Step = Command | RunScript | Pause


@dataclass(frozen=True, slots=True)
class Policy:
    """What a client is to do where the protocol leaves it open, and the two times that all of a queue agree on."""

    queue_ttl_s: float = 24 * 3600.0
    result_ttl_s: float = 600.0
    max_backlog: int | None = None  # None: as many jobs may wait as like
    give_up_s: float = 30.0  # how long a submission or cancellation tries while Redis does not answer


class CancelOutcome(StrEnum):
    """What `cancel` found and did."""

    CANCELLED = "cancelled"  # it was only queued and has ended now
    REQUESTED = "requested"  # a worker runs it and will end it
    FINISHED = "already finished"  # nothing to do
    UNKNOWN = "unknown"  # no stream: a job that is still queued without one will be cancelled when it begins


class Patience:
    """Pauses between tries, growing and jittered, until `limit_s` is used up."""

    def __init__(self, request_id: str, limit_s: float) -> None:
        self._id = request_id
        self._ends_s = time.monotonic() + limit_s
        self._backoff_s = BACKOFF_S[0]

    def after(self, lost: LostReplyError) -> Pause:
        """The pause before the next try. Raises UnavailableError if there is no time for one."""
        pause = Pause(next_pause_s := _RANDOM.uniform(0.5, 1.0) * self._backoff_s)
        if time.monotonic() + next_pause_s > self._ends_s:
            raise UnavailableError(self._id, lost.reason) from lost
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_S[1])
        return pause


# --- submit -----------------------------------------------------------------------------------------------------------


def submit(job: Submission, keys: Keys, policy: Policy) -> Generator[Step, Any, bool]:
    """Write `queued`, then add the job; give whether this call has, or found the request there.

    Raises QueueFullError, ConflictError, UnavailableError.
    """
    patience = Patience(job.id, policy.give_up_s)
    own: set[EntryId] = set()  # the `queued` entries that this call has tried to write
    while True:
        try:
            if not (yield from _must_add(job, keys, policy, own)):
                return bool(own)
            fields = ("id", job.id, job.field, job.payload, "v", "1", "fp", job.fp)
            jobs = keys.jobs(job.priority)
            yield Command(jobs, ("XADD", jobs, "*", *fields))
        except LostReplyError as lost:
            yield patience.after(lost)
        else:
            return True


def _must_add(job: Submission, keys: Keys, policy: Policy, own: set[EntryId]) -> Generator[Step, Any, bool]:
    """Write `queued` if there is no stream; give whether the job is to be added (again)."""
    out = keys.out(job.id)
    # The append looks and writes in one: to look first is for a call that has tried before, or that may not write.
    look_first = bool(own) or policy.max_backlog is not None
    while True:
        if look_first:
            entries = replies.entries((yield Command(out, ("XRANGE", out, "-", "+", "COUNT", 2))))
            if entries:
                return (yield from _must_add_to(entries, job, out, own))
            if policy.max_backlog is not None and not own:
                yield from _check_backlog(keys, policy.max_backlog)
        at = (0, replies.time_ms((yield Command(out, ("TIME",)))))
        own.add(at)
        entry = encode(to_map(Queued(at, job.fp)), job.kind)
        args = ("", format_id(at), *entry, _ms(policy.queue_ttl_s), "1")
        reply = yield RunScript(APPEND, (out, keys.cancel(job.id)), args)
        if replies.script_ok(reply):
            return True
        own.discard(at)  # refused: if an entry of this id is there, it is another call's
        look_first = True


def _must_add_to(
    entries: list[replies.Entry], job: Submission, out: str, own: set[EntryId]
) -> Generator[Step, Any, bool]:
    """The same where the stream is there; `entries` are its first two."""
    first = _first_event(job, *entries[0])
    own.intersection_update({first.id})  # whatever else was tried is not there
    if len(entries) > 1 or not isinstance(first, Queued):
        return False
    if own:
        return True
    now_ms = replies.time_ms((yield Command(out, ("TIME",))))
    return now_ms - first.id[1] >= RETRY_QUEUED_AFTER_MS


def _first_event(job: Submission, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Queued | Started:
    """The first event of the stream, if that is this very request's. Raises ConflictError."""
    try:
        first = decode(entry_id, fields, job.id)
    except MalformedEntryError as error:
        raise ConflictError(job.id, job.fp, None) from error
    if not isinstance(first, Queued | Started):
        raise ConflictError(job.id, job.fp, None)
    if first.fp != job.fp:
        raise ConflictError(job.id, job.fp, first.fp)
    return first


def _check_backlog(keys: Keys, max_backlog: int) -> Generator[Step, Any, None]:
    """Waiting is what no worker has taken: what the group has not read, or all of a stream that has no group."""
    num_waiting = 0
    for jobs in keys.all_jobs:
        length = replies.integer((yield Command(jobs, ("XLEN", jobs))))
        if length:
            groups = yield Command(jobs, ("XINFO", "GROUPS", jobs))
            num_waiting += replies.num_waiting(groups, GROUP, length)
    if num_waiting >= max_backlog:
        raise QueueFullError(num_waiting, max_backlog)


# --- cancel -----------------------------------------------------------------------------------------------------------


def cancel(request_id: str, keys: Keys, policy: Policy) -> Generator[Step, Any, CancelOutcome]:
    """End a request that is queued, ask for the end of one that runs. Raises UnavailableError, MalformedEntryError."""
    patience = Patience(request_id, policy.give_up_s)
    own: set[EntryId] = set()  # the `finished` entries that this call has tried to write
    num_misses = 0
    while True:
        try:
            outcome = yield from _try_cancel(request_id, keys, policy, own, num_misses >= _MAX_MISSES)
            if outcome is not None:
                return outcome
            num_misses += 1
        except LostReplyError as lost:
            yield patience.after(lost)


def _try_cancel(
    request_id: str, keys: Keys, policy: Policy, own: set[EntryId], far: bool
) -> Generator[Step, Any, CancelOutcome | None]:
    """None if the stream has gone on between looking and acting; `far` if it did so again and again."""
    out, flag = keys.out(request_id), keys.cancel(request_id)
    entries = replies.entries((yield Command(out, ("XREVRANGE", out, "+", "-", "COUNT", 1))))
    if not entries:
        reply = yield RunScript(CANCEL, (out, flag), ("", _ms(policy.queue_ttl_s)))
        return CancelOutcome.UNKNOWN if replies.script_ok(reply) else None
    entry_id, fields = entries[0]
    newest = decode(entry_id, fields, request_id)
    if isinstance(newest, Finished) and newest.done:
        return CancelOutcome.CANCELLED if newest.id in own else CancelOutcome.FINISHED
    if isinstance(newest, Queued):
        end = Finished((0, newest.id[1] + 1), "cancelled", done=True, usage=Usage(0, 0))
        own.add(end.id)
        kind: Kind = "d" if b"d" in fields else "json"
        args = (entry_id, format_id(end.id), *encode(to_map(end), kind), _ms(policy.result_ttl_s), "1")
        if replies.script_ok((yield RunScript(APPEND, (out, flag), args))):
            return CancelOutcome.CANCELLED
        own.discard(end.id)  # refused: if an entry of this id is there, it is another call's
        return None
    reply = yield RunScript(CANCEL, (out, flag), ("*" if far else entry_id, _ms(policy.queue_ttl_s)))
    return CancelOutcome.REQUESTED if replies.script_ok(reply) else None


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
