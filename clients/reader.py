"""What a reader knows of a request's stream: a state machine that does no I/O, shared by the sync and async client.

A reader holds the id of the last entry it was fed and how many tokens of each choice it has. It asks for entries after
that one; after a reconnect, or with a kept cursor, for that one once more, to see that it is still there. What it is
fed must follow from what it has, or it raises: more tokens than it has seen come by is a gap, fewer a rewind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from .entries import decode, format_id, parse_id
from .errors import ChangedError, ConfigError, ExpiredError, GapError, MalformedEntryError, RewoundError
from .events import EntryId, Event, Finished, Queued, Started, Tokens
from .keys import check_id

MAX_CHOICES: Final = 16
_MAX_K: Final = (1 << 64) - 1
_CURSOR = re.compile(r"([0-9]{1,20}-[0-9]{1,20});([0-9a-f]{64})?;([0-9]{1,19}(?:\.[0-9]{1,19}){0,15})")


class Reader:
    """Follows one stream. `cursor` is '' for its beginning, or what another reader's `cursor` was.

    Raises ConfigError if the id or the cursor cannot be one.
    """

    def __init__(self, request_id: str, cursor: str = "") -> None:
        self.request_id = check_id(request_id)
        self.position: EntryId | None = None  # id of the last entry fed
        self.fp: str | None = None
        self.done = False  # the terminal entry was fed
        self._counts: list[int] = []  # tokens that the reader has, per choice
        self._verify = False  # the next entry must be the one at `position`
        if cursor:
            self._resume(cursor)

    @property
    def seen(self) -> bool:
        """Whether the stream was there once."""
        return self.position is not None

    @property
    def verifying(self) -> bool:
        """Whether the next entry must be the last one fed, once more."""
        return self._verify

    @property
    def cursor(self) -> str:
        """Where to go on from, as text: everything up to here was fed. '' before the first entry."""
        if self.position is None:
            return ""
        return f"{format_id(self.position)};{self.fp or ''};{'.'.join(map(str, self._counts or [0]))}"

    @property
    def read_from(self) -> str:
        """The id after which the server is to read: XREAD gives what is greater."""
        if self.position is None:
            return "0-0"
        return format_id(_predecessor(self.position) if self._verify else self.position)

    def count(self, choice: int = 0) -> int:
        """Tokens that the reader has of a choice."""
        return self._counts[choice] if choice < len(self._counts) else 0

    def reconnected(self) -> None:
        """The connection was another one since the last entry: look again whether that entry is still there."""
        self._verify = self.seen

    def gone(self) -> None:
        """The server has no such stream. Raises ExpiredError if it had one; else it is still to come."""
        if self.seen:
            raise ExpiredError(self.request_id)

    def feed(self, entry_id: bytes | str, fields: Mapping[bytes, bytes]) -> Event | None:
        """Take the next entry; None if there is nothing new in it for the caller.

        Raises MalformedEntryError, GapError, RewoundError or ChangedError; then the reader stands where it stood.
        """
        if self.done:
            return None
        event = decode(entry_id, fields, self.request_id)
        at = parse_id(entry_id) if event is None else event.id
        if self._verify and self.position is not None:
            if at != self.position:
                have = sum(self._counts)
                raise RewoundError(self.request_id, "the last entry read is no longer there", None, have, 0)
            self._verify = False
            self.done = isinstance(event, Finished) and event.done
            return None
        if event is not None:
            self._check(event)
            self._take(event)
        self.position = at
        return event

    def _resume(self, cursor: str) -> None:
        match = _CURSOR.fullmatch(cursor)
        counts = [int(count) for count in match[3].split(".")] if match else []
        if match is None or (position := parse_id(match[1])) == (0, 0) or max(*position, *counts) > _MAX_K:
            raise ConfigError("not a cursor of a reader", "cursor")
        self.position, self.fp, self._counts, self._verify = position, match[2], counts, True

    def _check(self, event: Event) -> None:
        match event:
            case Tokens():  # first: nearly all are
                self._check_chunk(event)
            case Queued():
                self._check_fp(event.fp)
            case Started():
                self._check_fp(event.fp)
                for choice in range(max(len(event.resumed), len(self._counts))):
                    settled = event.resumed[choice] if choice < len(event.resumed) else 0
                    self._check_count("settled tokens", choice, self.count(choice), settled)
            case Finished():
                self._check_chunk(event)
                if event.done and event.usage is not None:
                    have = sum(self._counts) + len(event.token_ids)
                    self._check_count("usage", None, have, event.usage.completion)
            case _:
                pass

    def _check_chunk(self, event: Tokens | Finished) -> None:
        if not 0 <= event.choice < MAX_CHOICES:
            raise self._malformed(event, f"a choice that is not from 0 to {MAX_CHOICES - 1}")
        if event.index is not None:
            self._check_count("index", event.choice, self.count(event.choice), event.index)
        elif event.token_ids:
            raise self._malformed(event, "tokens without an index")

    def _malformed(self, event: Event, message: str) -> MalformedEntryError:
        return MalformedEntryError(self.request_id, format_id(event.id), message)

    def _check_count(self, what: str, choice: int | None, have: int, told: int) -> None:
        if told != have:
            of = "" if choice is None else f" of choice {choice}"
            kind = GapError if told > have else RewoundError
            raise kind(self.request_id, f"{what}{of}: {told}, but {have} tokens were read", choice, have, told)

    def _check_fp(self, fp: str) -> None:
        if self.fp is not None and fp != self.fp:
            raise ChangedError(self.request_id, self.fp, fp)

    def _take(self, event: Event) -> None:
        if isinstance(event, (Tokens, Finished)):
            while len(self._counts) <= event.choice:
                self._counts.append(0)
            self._counts[event.choice] += len(event.token_ids)
            self.done = isinstance(event, Finished) and event.done
        elif isinstance(event, (Queued, Started)):
            self.fp = event.fp


def _predecessor(entry_id: EntryId) -> EntryId:
    """The greatest id below `entry_id`, which is above (0, 0)."""
    attempt, counter = entry_id
    return (attempt, counter - 1) if counter else (attempt - 1, _MAX_K)
