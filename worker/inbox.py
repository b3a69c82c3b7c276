"""How entries come in: new ones, ones whose delivery was lost, ones that others have abandoned.

`docs/protocol.md`, "A worker", 1 and 5. Whatever comes in is held, and so renewed, from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from ..clients.events import JobRef
from ..clients.keys import GROUP
from . import lua
from .batch import Batch
from .clock import server_s
from .connection import FORBIDDEN, Failed, as_failed
from .context import Context
from .held import Held, new_held
from .lua import Args

_PENDING_PER_READ = 500
_REVERSED_EVERY = 8  # every so many takes begin with the lowest priority, so that it is never starved
# A sweep for abandoned entries costs the server time in proportion to what is pending; it may use a fiftieth of it.
_SWEEP_PAUSE = 50
_LONGEST_SWEEP_PAUSE_S = 5.0
_PAUSE_S = 1.0  # after an error that taking again at once would only repeat, such as a key of another type


class Inbox:
    """Takes entries. `on_held` is told of each new one."""

    def __init__(self, context: Context, on_held: Callable[[Held], None]) -> None:
        self._context = context
        self._on_held = on_held
        self._streams = context.keys.all_jobs
        self._num_takes = 0
        self._next_sweep_s = 0.0
        self._sweep_begun_at: float | None = None  # server's clock
        self._own_pages: list[tuple[str, bytes]] = []  # parts of the own pending list still to be read: stream, start
        self._unknown: list[JobRef] = []  # own pending entries that memory has not
        self._abandoned: list[JobRef] = []
        self._paused_until_s = 0.0
        self.took_nothing = False  # the last take found no new entry
        self.swept_empty = False  # so did the last sweep for abandoned ones
        self.groups_missing = True  # on a jobs stream there may be no group
        self._no_groups_before_s = 0.0  # monotonic time: one could not be made

    # --- new entries --------------------------------------------------------------------------------------------------

    def collect_groups(self, batch: Batch) -> None:
        """Create the groups, at the beginning of their streams, so that nothing added before is missed."""
        if time.monotonic() < self._no_groups_before_s:
            return
        for stream in self._streams:
            batch.add((b"XGROUP", b"CREATE", stream, GROUP, b"0", b"MKSTREAM"), partial(self._created, stream))
        self.groups_missing = False

    def _created(self, stream: str, outcome: Any) -> None:
        if isinstance(outcome, Failed) and outcome.code != "BUSYGROUP":
            self.groups_missing = True
            if not outcome.again:
                self._no_groups_before_s = time.monotonic() + _PAUSE_S
                self._context.log.error("cannot create the group", stream=stream, error=outcome.message)

    def collect_take(self, batch: Batch, room: int) -> None:
        """Take at most `room` new entries, the highest priority first."""
        if self.is_paused:
            return
        self._num_takes += 1
        streams = self._streams[::-1] if self._num_takes % _REVERSED_EVERY == 0 else self._streams
        command = lua.call(lua.TAKE, streams, (self._context.worker, room))
        batch.add(command, partial(self._taken, streams, time.monotonic()))

    def _taken(self, streams: tuple[str, ...], sent_s: float, outcome: Any) -> None:
        if isinstance(outcome, Failed):
            self._context.reconcile = True  # what it has taken is in the own pending list
            self._not_taken("any", outcome)
            return
        self.took_nothing = True
        for index, entries in cast("list[tuple[int, Any]]", outcome):
            if isinstance(entries, bytes):
                self._not_taken(streams[index - 1], as_failed(entries.decode("utf-8", "replace")))
            elif entries:
                self.took_nothing = False
                self.deliver(streams[index - 1], entries, sent_s)

    def _not_taken(self, stream: str, failed: Failed) -> None:
        if failed.code == "NOGROUP":
            self.groups_missing = True
        if failed.code == "NOGROUP" or failed.again:
            return
        self._pause()
        if failed.code == FORBIDDEN:
            self._context.alarms.forbidden({failed.code: failed.message})
        else:
            error = f"{failed.code} {failed.message}"
            self._context.log.error("cannot take from a stream of jobs", stream=stream, error=error)

    def _pause(self) -> None:
        self._paused_until_s = time.monotonic() + _PAUSE_S

    @property
    def is_paused(self) -> bool:
        """Whether nothing is taken for a moment."""
        return time.monotonic() < self._paused_until_s

    def blocking_take(self, count: int, block_s: float) -> Args:
        """The command that waits for new entries: at most `count` of each stream."""
        return (
            *(b"XREADGROUP", b"GROUP", GROUP, self._context.worker, b"COUNT", count),
            *(b"BLOCK", max(1, int(block_s * 1000)), b"STREAMS", *self._streams, *([b">"] * len(self._streams))),
        )

    def blocking_taken(self, outcome: Any, sent_s: float) -> None:
        """Take the reply to `blocking_take`, which was sent at monotonic `sent_s`."""
        if isinstance(outcome, Failed):
            self._context.reconcile = True
            self._not_taken("any", outcome)
            return
        for stream, entries in outcome or ():
            self.deliver(stream.decode(), entries, sent_s)

    def deliver(self, stream: str, entries: Iterable[Any], sent_s: float) -> None:
        """Hold entries that came as new. One that memory has already was delivered twice (its group was made anew)."""
        for entry_id, pairs in entries:
            ref = JobRef(stream, entry_id.decode())
            if ref not in self._context.memory:
                self._context.counters.taken += 1
                self._hold(ref, pairs, sent_s, is_new=True)

    def _hold(self, ref: JobRef, pairs: list[bytes] | None, sent_s: float, *, is_new: bool = False) -> None:
        held = new_held(ref, pairs)
        held.is_new = is_new
        self._context.memory.add(held, sent_s)
        self._on_held(held)

    # --- the own pending list -----------------------------------------------------------------------------------------

    def collect_own(self, batch: Batch) -> None:
        """Compare the own pending list with memory: what only the list has is a delivery whose reply was lost."""
        if self._context.reconcile:
            self._context.reconcile = False
            self._own_pages = [(stream, b"-") for stream in self._streams]
        pages, self._own_pages = self._own_pages, []
        for stream, start in pages:
            command = (b"XPENDING", stream, GROUP, start, b"+", _PENDING_PER_READ, self._context.worker)
            batch.add(command, partial(self._own, stream))
        unknown, self._unknown = self._unknown, []
        for ref in unknown:
            command = lua.call(lua.FETCH, (ref.key,), (self._context.worker, ref.entry_id))
            batch.add(command, partial(self._fetched, ref, time.monotonic()))

    def _own(self, stream: str, outcome: Any) -> None:
        if isinstance(outcome, Failed):
            # Without a group nothing is pending; after anything else, ask again.
            self._context.reconcile = self._context.reconcile or outcome.again
            return
        refs = [JobRef(stream, row[0].decode()) for row in outcome]
        self._unknown += [ref for ref in refs if ref not in self._context.memory and not self._context.is_left(ref)]
        if len(refs) == _PENDING_PER_READ:
            self._own_pages.append((stream, b"(" + outcome[-1][0]))

    def _fetched(self, ref: JobRef, sent_s: float, outcome: Any) -> None:
        if isinstance(outcome, Failed):
            self._context.reconcile = self._context.reconcile or outcome.again
        elif outcome[0] == 1 and ref not in self._context.memory:
            self._context.counters.lost_replies += 1
            self._context.log.info("a delivery whose reply was lost", job=ref.entry_id)
            self._hold(ref, outcome[1] if len(outcome) > 1 else None, sent_s)

    @property
    def is_comparing(self) -> bool:
        """Whether the comparison with the own pending list is not done."""
        return bool(self._context.reconcile or self._own_pages or self._unknown)

    @property
    def is_busy(self) -> bool:
        """Whether it knows of entries that it has not fetched yet."""
        return self.is_comparing or self.has_abandoned or self.groups_missing

    @property
    def has_abandoned(self) -> bool:
        """Whether it knows of abandoned entries that it has not claimed yet."""
        return bool(self._abandoned)

    # --- abandoned entries --------------------------------------------------------------------------------------------

    def collect_abandoned(self, batch: Batch, room: int) -> int:
        """Look for entries idle beyond the lease, now and then; claim at most `room` of them. Returns how many."""
        lease_ms, now_s = int(self._context.settings.lease_s * 1000), time.monotonic()
        if now_s >= self._next_sweep_s:
            self._sweep(batch, lease_ms, now_s)
        # Those for which there is no room now are claimed as room comes, if nobody has been quicker.
        claim, self._abandoned = self._abandoned[:room], self._abandoned[room:]
        for stream in self._streams:
            ids = [ref.entry_id for ref in claim if ref.key == stream]
            if ids:
                command = (b"XCLAIM", stream, GROUP, self._context.worker, lease_ms, *ids)
                batch.add(command, partial(self._claimed, stream, now_s))
        return len(claim)

    def _sweep(self, batch: Batch, lease_ms: int, now_s: float) -> None:
        """Read all that is idle. Timed on the server's clock: the replies wait here until a step is done."""
        self._next_sweep_s = now_s + self._context.settings.block_s
        self._abandoned = []
        self.swept_empty = True
        batch.add((b"TIME",), partial(self._sweep_begun, now_s))
        for stream in self._streams:
            command = (b"XPENDING", stream, GROUP, b"IDLE", lease_ms, b"-", b"+", _PENDING_PER_READ)
            batch.add(command, partial(self._swept, stream))
        batch.add((b"TIME",), partial(self._sweep_ended, now_s))

    def _sweep_begun(self, sent_s: float, outcome: Any) -> None:
        self._context.clock.set(outcome, sent_s)
        self._sweep_begun_at = None if isinstance(outcome, Failed) else server_s(outcome)

    def _sweep_ended(self, sent_s: float, outcome: Any) -> None:
        if self._sweep_begun_at is None or isinstance(outcome, Failed):
            return
        took_s = server_s(outcome) - self._sweep_begun_at
        self._next_sweep_s = max(self._next_sweep_s, sent_s + min(took_s * _SWEEP_PAUSE, _LONGEST_SWEEP_PAUSE_S))

    def _swept(self, stream: str, outcome: Any) -> None:
        if isinstance(outcome, Failed):
            return
        refs = [JobRef(stream, row[0].decode()) for row in outcome]
        found = [ref for ref in refs if ref not in self._context.memory and not self._context.is_left(ref)]
        self._abandoned += found
        self.swept_empty = self.swept_empty and not found

    def _claimed(self, stream: str, sent_s: float, outcome: Any) -> None:
        if isinstance(outcome, Failed):
            self._context.reconcile = True
            return
        for item in outcome:
            # Of several workers that claim the same entry one gets it: claiming makes it busy for the others.
            if item is not None and (ref := JobRef(stream, item[0].decode())) not in self._context.memory:
                self._context.counters.recovered += 1
                self._context.log.info("recovered", job=ref.entry_id)
                self._hold(ref, item[1], sent_s)
