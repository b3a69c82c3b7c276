"""The protocol's invariants I1 to I9, checked over everything that lies under a prefix after a test.

I10 (renewals and re-reads charge nothing) does not show in what lies there; it has a test of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import redis

from headrace.clients.entries import decode
from headrace.clients.events import Event, Finished, Queued, Started, Tokens
from tests.support.scripted import ByteTokenizer


class InvariantError(AssertionError):
    """A promise of the protocol is broken; the message says which, for which request."""


@dataclass
class Told:
    """What a stream tells of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: Finished | None = None


def events_of(client: redis.Redis, out: str) -> list[Event]:
    """All events of a request's stream, in order."""
    return [event for entry_id, fields in client.xrange(out) if (event := decode(entry_id, fields, out)) is not None]


def told(events: Iterable[Event]) -> dict[int, Told]:
    """The choices that a stream tells of."""
    choices: dict[int, Told] = {}
    for event in events:
        if isinstance(event, Tokens | Finished):
            choice = choices.setdefault(event.choice, Told())
            choice.token_ids += event.token_ids
            choice.text += event.text
            if isinstance(event, Finished):
                choice.finished = event
    return choices


class StreamChecker:
    """Checks one stream, entry by entry: I1, I2, I3, I8 and I9; and at its end I4."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._events: list[Event] = []
        self._lengths: dict[int, int] = {}
        self._attempt = 0
        self._fp: str | None = None
        self.ended = False

    def take(self, event: Event) -> None:
        """One more entry."""
        self._require(not self.ended, "I2 an entry behind the terminal one")
        self._events.append(event)
        if isinstance(event, Queued | Started):
            self._require(self._fp in {None, event.fp}, "fp changes")
            self._fp = event.fp
        if isinstance(event, Queued):
            self._require(len(self._events) == 1, "queued is not the first entry")
        elif isinstance(event, Started):
            self._started(event)
        elif isinstance(event, Tokens | Finished):
            self._chunk(event)
            if isinstance(event, Finished) and event.done:
                self._terminal(event)

    def _require(self, holds: object, what: str) -> None:
        if not holds:
            raise InvariantError(f"{self._name}: {what}\n" + "\n".join(map(str, self._events)))

    def _started(self, event: Started) -> None:
        self._require(event.attempt == self._attempt + 1, f"I3 attempt {event.attempt} behind {self._attempt}")
        self._attempt = event.attempt
        found = tuple(self._lengths.get(choice, 0) for choice in range(len(event.resumed)))
        self._require(event.resumed == found, f"resumed says {event.resumed}, there are {found}")

    def _chunk(self, event: Tokens | Finished) -> None:
        if event.logprobs is not None:
            self._require(len(event.logprobs) == len(event.token_ids), "lp does not fit t")
        if event.index is not None:
            found = self._lengths.get(event.choice, 0)
            self._require(event.index == found, f"I1 index {event.index} with {found} tokens so far")
            self._lengths[event.choice] = found + len(event.token_ids)
        else:
            self._require(not event.token_ids, "I1 tokens without an index")

    def _terminal(self, event: Finished) -> None:
        self.ended = True
        total = sum(self._lengths.values())
        completion = None if event.usage is None else event.usage.completion
        # Only what a client has cancelled while it was queued may do without: no worker has touched it.
        untouched = self._attempt == 0 and completion is None
        self._require(completion == total or untouched, f"I9 {completion} for {total} tokens")
        for index, choice in told(self._events).items():
            whole = ByteTokenizer().decode(choice.token_ids)
            stop = None if choice.finished is None else choice.finished.stop
            if isinstance(stop, str):
                self._require(whole.startswith(choice.text), f"I4 {choice.text!r} does not begin {whole!r}")
                self._require(stop in whole, f"I4 choice {index}: {stop!r} is not in {whole!r}")
            else:
                self._require(choice.text == whole, f"I4 choice {index}: {choice.text!r} is not {whole!r}")


def check_stream(name: str, events: list[Event], *, must_end: bool = True) -> None:
    """I1, I2, I3, I4, I8 and I9 for one stream. Raises InvariantError."""
    checker = StreamChecker(name)
    for event in events:
        checker.take(event)
    if must_end and not checker.ended:
        raise InvariantError(f"{name}: I2 no terminal entry\n" + "\n".join(map(str, events)))


def check_all(
    client: redis.Redis, prefix: str, submitted: Collection[str] = (), *, open_ids: Collection[str] = ()
) -> None:
    """Every invariant over everything under a prefix. Requests in `open_ids` need not have ended."""
    ended: set[str] = set()
    for key in client.scan_iter(match=f"{prefix}:*", count=1000):
        name = key.decode()
        kind = client.type(key)
        if name.startswith(f"{prefix}:req:") and name.endswith(":out"):
            request_id = name[len(f"{prefix}:req:{{") : -len("}:out")]
            events = events_of(client, name)
            check_stream(request_id, events, must_end=request_id not in open_ids)
            if events and isinstance(events[-1], Finished) and events[-1].done:
                ended.add(request_id)
        permanent = name.endswith((":jobs", ":jobs:high", ":jobs:low", ":dead"))
        if not permanent and client.ttl(key) == -1:
            raise InvariantError(f"I5 {name} ({kind}) has no TTL")
    _check_jobs(client, prefix, ended, submitted)


def _check_jobs(client: redis.Redis, prefix: str, ended: set[str], submitted: Collection[str]) -> None:
    in_jobs: set[str] = set()
    for key in client.scan_iter(match=f"{prefix}:{{*}}:jobs*", count=1000):
        for entry_id, fields in client.xrange(key):
            request_id = fields.get(b"id", b"").decode("utf-8", "replace")
            in_jobs.add(request_id)
            if request_id in ended:
                raise InvariantError(f"I7 {request_id} has ended and its job {entry_id} is still there")
        try:
            pending = client.xpending(key, "workers")["pending"]
        except redis.ResponseError:
            continue
        if pending > client.xlen(key):
            raise InvariantError(f"I7 {key}: {pending} entries are pending of {client.xlen(key)}")
    for request_id in submitted:
        out = f"{prefix}:req:{{{request_id}}}:out"
        if request_id not in in_jobs and request_id not in ended and client.exists(out):
            raise InvariantError(f"I6 the job of {request_id} was acknowledged, and its stream has no terminal entry")
