"""What a stream of the sync client and one of the async client have in common: all but the waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from random import SystemRandom
from typing import Any, Final

from . import replies
from .errors import RequestFailedError, WaitTimeoutError
from .events import Event, Finished
from .keys import Keys
from .reader import Reader
from .replies import Entry
from .steps import BACKOFF_S, Command, LostReplyError, Pause, Step

DEFAULT_TIMEOUT_S: Final = 600.0
_READ_COUNT: Final = 256
_RANDOM = SystemRandom()


class Limit:
    """How long a reader waits for the next entry, or, if `total`, for all of them; None for as long as it takes."""

    def __init__(self, timeout_s: float | None, *, total: bool = False) -> None:
        self.timeout_s = float("inf") if timeout_s is None else timeout_s
        self._ends_s = time.monotonic() + self.timeout_s if total else None

    def ends_s(self) -> float:
        """When a wait that begins now ends, on the monotonic clock."""
        return time.monotonic() + self.timeout_s if self._ends_s is None else self._ends_s


class Following:
    """A reader, and the entries that were fetched and not yet given to it."""

    def __init__(self, reader: Reader, keys: Keys, limit: Limit, raise_on_error: bool) -> None:
        self._reader = reader
        self._out = keys.out(reader.request_id)
        self._limit = limit
        self._raise_on_error = raise_on_error
        self._entries: deque[Entry] = deque()

    @property
    def cursor(self) -> str:
        """Where to go on from: only what was taken counts, not what was fetched."""
        return self._reader.cursor

    @property
    def done(self) -> bool:
        """Whether the end was taken."""
        return self._reader.done

    def add(self, entries: Sequence[Entry]) -> None:
        """Keep entries that were fetched."""
        self._entries.extend(entries)

    def interrupted(self) -> None:
        """The connection was given up: what is taken next is fetched anew, from the last entry taken on."""
        self._entries.clear()
        self._reader.reconnected()

    def take(self) -> Event | None:
        """The next event of what was fetched; None if nothing new is left in it.

        Raises StreamError for what cannot follow, and RequestFailedError for an end with an error, if that is wanted.
        """
        while self._entries:
            event = self._reader.feed(*self._entries.popleft())
            if isinstance(event, Finished) and event.done and event.error is not None and self._raise_on_error:
                error = event.error
                raise RequestFailedError(self._reader.request_id, error.code, error.message, error.param, event)
            if event is not None:
                return event
        return None

    def fetch(self, max_block_ms: int) -> Generator[Step, Any, list[Entry]]:
        """The next entries, at least one. Raises ExpiredError, WaitTimeoutError."""
        reader, out = self._reader, self._out
        ends_s = self._limit.ends_s()
        backoff_s, reason, at_once = BACKOFF_S[0], None, True
        while True:
            left_s = max(0.0, ends_s - time.monotonic())
            # What was read before is there at once, or a look is due whether the stream is.
            block_ms = 1 if reader.verifying and at_once else max(1, int(min(left_s * 1000, max_block_ms)))
            try:
                args = ("XREAD", "COUNT", _READ_COUNT, "BLOCK", block_ms, "STREAMS", out, reader.read_from)
                entries = replies.stream_entries((yield Command(out, args)))
                if entries:
                    return entries
                if reader.seen and not replies.integer((yield Command(out, ("EXISTS", out)))):
                    reader.gone()
                backoff_s, reason, at_once = BACKOFF_S[0], None, False
            except LostReplyError as lost:
                reason, at_once = lost.reason, True
                reader.reconnected()
                yield Pause(min(left_s, _RANDOM.uniform(0.5, 1.0) * backoff_s))
                backoff_s = min(backoff_s * 2, BACKOFF_S[1])
            if time.monotonic() >= ends_s:
                timeout_s = self._limit.timeout_s
                raise WaitTimeoutError(reader.request_id, timeout_s, reader.cursor, seen=reader.seen, lost=reason)
