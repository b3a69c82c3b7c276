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


def check_stream(name: str, events: list[Event], *, must_end: bool = True) -> None:
    """I1, I2, I3, I4, I8 and I9 for one stream."""

    def require(holds: object, what: str) -> None:
        if not holds:
            raise InvariantError(f"{name}: {what}\n" + "\n".join(map(str, events)))

    lengths: dict[int, int] = {}
    attempt = 0
    ended = False
    fp = None
    for number, event in enumerate(events):
        require(not ended, "I2 an entry behind the terminal one")
        if isinstance(event, Queued | Started):
            require(fp in {None, event.fp}, "fp changes")
            fp = event.fp
        if isinstance(event, Queued):
            require(number == 0, "queued is not the first entry")
        elif isinstance(event, Started):
            require(event.attempt == attempt + 1, f"I3 attempt {event.attempt} behind {attempt}")
            attempt = event.attempt
            for choice, resumed in enumerate(event.resumed):
                require(
                    lengths.get(choice, 0) == resumed, f"resumed says {resumed}, there are {lengths.get(choice, 0)}"
                )
        elif isinstance(event, Tokens | Finished):
            if event.token_ids or isinstance(event, Tokens):
                found = lengths.get(event.choice, 0)
                require(event.index == found, f"I1 index {event.index} with {found} tokens so far")
                lengths[event.choice] = found + len(event.token_ids)
            if event.logprobs is not None:
                require(len(event.logprobs) == len(event.token_ids), "lp does not fit t")
            if isinstance(event, Finished) and event.done:
                ended = True
                total = sum(lengths.values())
                if event.usage is not None:
                    require(event.usage.completion == total, f"I9 usage {event.usage} for {total} tokens")
                else:
                    require(attempt == 0, "I9 a terminal entry without usage")
    require(ended or not must_end, "I2 no terminal entry")
    if ended:
        _check_texts(events, require)


def _check_texts(events: list[Event], require) -> None:  # type: ignore[no-untyped-def]
    for index, choice in told(events).items():
        whole = ByteTokenizer().decode(choice.token_ids)
        cut = choice.finished is not None and isinstance(choice.finished.stop, str)
        if cut:
            assert choice.finished is not None
            require(whole.startswith(choice.text), f"I4 the text of choice {index} is not what its ids decode to")
            require(choice.finished.stop in whole, f"I4 the stop string of choice {index} is not in its output")
        else:
            require(choice.text == whole, f"I4 choice {index}: {choice.text!r} is not {whole!r}")


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
