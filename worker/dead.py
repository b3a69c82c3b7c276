"""The dead-letter stream of a queue: read what was given up, send it again, throw it away.

Sending again never loses a job: an entry is removed only once its job stands in the queue. The new request's id is made
of the entry's, so that trying again after a crash in between is the same request, not another one beside it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

import redis

from ..clients import replies, steps
from ..clients.errors import InvalidEntryError, InvalidJobError
from ..clients.job import decode_entry, decode_job
from ..clients.keys import PRIORITIES, Keys
from ..clients.link import Link
from ..clients.submission import Submission
from .exit_codes import CommandError, ExitCode, UsageError

TOLD: Final = ("reason", "error", "attempts", "worker", "from")  # what a worker puts behind the job's own fields
_ENTRY_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
_MOST_PER_READ = 256
_BYTES_PER_READ = 1 << 20  # payloads may be large: more than this is not asked for again in one go
_PER_TRIM = 100  # a server does nothing else while it trims
_GIVE_UP_S = 10.0


@dataclass(frozen=True)
class DeadEntry:
    """One entry. What no worker has put there has an empty `told`."""

    entry_id: str
    fields: tuple[tuple[bytes, bytes], ...]  # the job's own, as they came: perhaps garbage, perhaps given twice
    told: Mapping[str, str]  # by the names of TOLD

    @cached_property
    def request_id(self) -> str:
        """The id of the request as the job has it, valid or not; empty without one."""
        return dict(self.fields).get(b"id", b"").decode("utf-8", "backslashreplace")

    @property
    def at_ms(self) -> int:
        """When it was given up, on the server's clock."""
        return int(self.entry_id.partition("-")[0])

    def submission(self, keys: Keys, request_id: str) -> Submission:
        """Its job under another id, for the stream that it came from. Raises InvalidJobError if there is no valid job.

        The payload's bytes stay as they are, so that a limit of the worker's on their number is the worker's to apply.
        """
        by_name = dict(self.fields)
        entry = decode_entry(by_name)
        if len(by_name) != len(self.fields):
            raise InvalidEntryError("a field is given twice", "job", entry.id, entry.kind)
        decode_job(entry.payload, entry.kind, max_bytes=len(entry.payload))
        stream = self.told.get("from", "").partition(" ")[0]
        for priority in PRIORITIES:
            if keys.jobs(priority) == stream:
                fp = hashlib.sha256(entry.payload).hexdigest()
                return Submission(request_id, entry.kind, entry.payload, fp, priority)
        raise InvalidEntryError("names no stream of this queue", "from", entry.id, entry.kind)


class DeadLetters:
    """The dead-letter stream of one queue. `client` gives bytes, is this object's own and its parsing is changed here.

    Every method raises redis.RedisError.
    """

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._keys = keys
        own = cast(Any, client)
        self._run = own.execute_command
        for name in ("XRANGE", "XREVRANGE"):
            # redis-py makes a map of the fields, which hides that one was given twice
            own.set_response_callback(name, _as_it_is)

    def __len__(self) -> int:
        return int(self._run("XLEN", self._keys.dead))

    def newest(self, limit: int) -> Iterator[DeadEntry]:
        """At most `limit` entries, the newest first."""
        for rows in self._pages("XREVRANGE", "+", "-"):
            for row in rows[:limit]:
                yield _entry(row)
            limit -= len(rows)
            if limit <= 0:
                return

    def all_of_now(self) -> Iterator[DeadEntry]:
        """Every entry that is there now, the oldest first; not what is added while this goes on."""
        last = self._run("XREVRANGE", self._keys.dead, "+", "-", "COUNT", 1)
        for rows in self._pages("XRANGE", "-", last[0][0]) if last else ():
            for row in rows:
                yield _entry(row)

    def _pages(self, command: str, start: str, end: str | bytes) -> Iterator[list[Any]]:
        """What lies between two ids, a few entries at a time where they are large, and many where they are small."""
        count = 1
        while rows := self._run(command, self._keys.dead, start, end, "COUNT", count):
            yield rows
            start = f"({rows[-1][0].decode()}"
            mean_bytes = 1 + sum(len(part) for _, flat in rows for part in flat) // len(rows)
            count = max(1, min(2 * count, _MOST_PER_READ, _BYTES_PER_READ // mean_bytes))

    def find(self, entry_id: str) -> DeadEntry:
        """One entry. Raises UsageError for what is no entry's id, CommandError (NO_ANSWER) if there is none of it."""
        match = _ENTRY_ID.fullmatch(entry_id)
        if match is None or max(int(match[1]), int(match[2])) >= 1 << 64:
            raise UsageError(f"ENTRY_ID is {entry_id!r}: must be an id as `headrace dead ls` prints it")
        rows = self._run("XRANGE", self._keys.dead, entry_id, entry_id)
        if not rows:
            raise CommandError(f"no dead entry {entry_id} in queue {self._keys.queue}", ExitCode.NO_ANSWER)
        return _entry(rows[0])

    def remove(self, *entry_ids: str) -> int:
        """Remove entries; how many were still there."""
        return int(self._run("XDEL", self._keys.dead, *entry_ids)) if entry_ids else 0

    def bound(self, older_than_s: float | None) -> str | None:
        """The id below which everything is older than that; for None, than whatever comes next. None: nothing is."""
        if older_than_s is not None:
            seconds, microseconds = (int(part) for part in self._run("TIME"))
            return f"{max(0, seconds * 1000 + microseconds // 1000 - int(older_than_s * 1000))}-0"
        last = self._run("XREVRANGE", self._keys.dead, "+", "-", "COUNT", 1)
        if not last:
            return None
        ms, _, number = last[0][0].decode().partition("-")
        return f"{ms}-{int(number) + 1}"

    def remove_below(self, bound: str) -> int:
        """Remove every entry whose id is below `bound`; how many."""
        num_gone = 0
        # Whole nodes of the stream, some at a time; then what is left to remove is part of one.
        while num := int(self._run("XTRIM", self._keys.dead, "MINID", "~", bound, "LIMIT", _PER_TRIM)):
            num_gone += num
        return num_gone + int(self._run("XTRIM", self._keys.dead, "MINID", bound))


class Reviver:
    """Sends dead jobs again, as a client of the queue does, and then takes them off the dead-letter stream."""

    def __init__(self, letters: DeadLetters, link: Link, keys: Keys) -> None:
        self._letters = letters
        self._link = link
        self._keys = keys
        self._policy = steps.Policy(give_up_s=_GIVE_UP_S)

    def retry(self, entry: DeadEntry, chosen_id: str | None = None) -> str:
        """Add the entry's job to its queue, then remove the entry; the id of the new request.

        Raises InvalidJobError (no valid job), CommandError (REFUSED: the entry stays, since it cannot be told that its
        job is in), ConfigError, ConflictError, UnavailableError, ServerError.
        """
        job = entry.submission(self._keys, chosen_id or self._derived_id(entry))
        if not self._link.run(steps.submit(job, self._keys, self._policy)):
            # The stream was there. Of a derived id it is an earlier try's, which may have ended before the job was in.
            if chosen_id is not None:
                message = f"request {chosen_id} exists already; dead entry {entry.entry_id} stays"
                raise CommandError(message, ExitCode.REFUSED)
            if not self._has_begun(job.id):
                seconds = steps.RETRY_QUEUED_AFTER_MS // 1000
                message = f"dead entry {entry.entry_id} was sent as {job.id} a moment ago: again in {seconds} s"
                raise CommandError(message, ExitCode.REFUSED)
        self._letters.remove(entry.entry_id)
        return job.id

    def _derived_id(self, entry: DeadEntry) -> str:
        return hashlib.sha256(f"{self._keys.dead} {entry.entry_id}".encode()).hexdigest()[:32]

    def _has_begun(self, request_id: str) -> bool:
        """Whether more than `queued` is there: then the job was added."""
        out = self._keys.out(request_id)
        return self._link.run(_count_entries(out)) > 1


def _count_entries(out: str) -> Generator[steps.Step, Any, int]:
    return replies.integer((yield steps.Command(out, ("XLEN", out))))


def why_not(entry: DeadEntry, keys: Keys) -> str | None:
    """Why an entry cannot be sent again; None if it can."""
    try:
        entry.submission(keys, "any")
    except InvalidJobError as error:
        return explained(error)
    return None


def explained(error: InvalidJobError) -> str:
    """What is wrong with a job, in words."""
    return error.message + (f" ({error.param})" if error.param else "")


def _as_it_is(reply: Any, **_options: Any) -> Any:
    return reply


def _entry(row: Any) -> DeadEntry:
    entry_id, flat = cast(tuple[bytes, list[bytes]], row)
    pairs: tuple[tuple[bytes, bytes], ...] = tuple(zip(flat[::2], flat[1::2], strict=True))
    last = pairs[-len(TOLD) :]
    if [name.decode("utf-8", "replace") for name, _ in last] != list(TOLD):
        return DeadEntry(entry_id.decode(), pairs, {})
    told = {name.decode(): value.decode("utf-8", "backslashreplace") for name, value in last}
    return DeadEntry(entry_id.decode(), pairs[: -len(TOLD)], told)
