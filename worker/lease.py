"""Leases: what this worker holds, and the thread that renews it.

The thread has a connection of its own and touches nothing of the engine. It renews exactly what the step loop holds,
every third of the lease, and only while the loop makes progress: a loop that hangs must lose its jobs to another
worker. What it learns is read by the loop, which alone decides what to do about it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..clients.events import JobRef
from . import lua
from .clock import ServerClock
from .cluster import AnyLink
from .connection import Failed
from .lua import Args
from .options import WorkerSettings
from .rights import Alarms

_IDS_PER_SCRIPT = 100  # a script holds the server for as long as it runs


@dataclass(slots=True)
class Lease:
    """What is known of one entry's lease. The renewal thread changes it, and each field is right by itself."""

    since_s: float  # monotonic time at which the command was sent that last showed the entry to be ours
    renewals: int = 0
    lost: bool = False  # a renewal has shown it to be another's, or gone


class Leases:
    """The entries held. The loop puts in and takes out, the renewal thread updates."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._missed_after_s = settings.missed_after_s
        self._lock = threading.Lock()
        self._leases: dict[JobRef, Lease] = {}
        self._progress_s = time.monotonic()
        self.rounds = 0  # renewals done, for those who do something after each
        self.num_lost = 0  # entries that a renewal has shown to be lost

    def hold(self, ref: JobRef, since_s: float) -> Lease:
        """Hold an entry that a command sent at `since_s` (monotonic) has given to this worker."""
        lease = Lease(since_s)
        with self._lock:
            self._leases[ref] = lease
        return lease

    def release(self, ref: JobRef) -> None:
        """Hold it no longer."""
        with self._lock:
            self._leases.pop(ref, None)

    def __len__(self) -> int:
        """Number of entries held."""
        return len(self._leases)

    def held(self) -> list[JobRef]:
        """All entries held."""
        with self._lock:
            return list(self._leases)

    def may_publish(self, lease: Lease, now_s: float) -> bool:
        """Whether the last renewal that was due has been seen to succeed."""
        return not lease.lost and now_s - lease.since_s < self._missed_after_s

    def may_begin(self, lease: Lease, now_s: float) -> bool:
        """Whether the lease has not run out since the entry was last seen to be ours."""
        return not lease.lost and now_s - lease.since_s < self._settings.lease_s

    def renewed(self, refs: list[JobRef], mine: list[bool], sent_s: float) -> None:
        """Take what a renewal sent at `sent_s` has shown."""
        with self._lock:
            for ref, is_mine in zip(refs, mine, strict=True):
                lease = self._leases.get(ref)
                if lease is None or lease.since_s > sent_s:  # let go meanwhile, or taken anew after this was sent
                    continue
                if is_mine:
                    lease.since_s = sent_s
                    lease.renewals += 1
                else:
                    lease.lost = True
                    self.num_lost += 1

    def progress(self) -> None:
        """The step loop: I am alive and get on."""
        self._progress_s = time.monotonic()

    def stalled(self, now_s: float) -> bool:
        """Whether the step loop has shown no progress for longer than the watchdog allows."""
        return now_s - self._progress_s > self._settings.watchdog_s


class LeaseThread:
    """Renews leases and writes the worker's hash until it is stopped."""

    def __init__(
        self,
        link: AnyLink,
        leases: Leases,
        settings: WorkerSettings,
        worker: str,
        *,
        clock: ServerClock,
        heartbeat: Callable[[bool], Args],
        wake: Callable[[], None],
        alarms: Alarms,
    ) -> None:
        self._link = link
        self._alarms = alarms
        self._leases = leases
        self._settings = settings
        self._worker = worker
        self._clock = clock
        self._heartbeat = heartbeat  # the command that writes the worker's hash; told whether the loop is stalled
        self._wake = wake
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-leases", daemon=True)

    def heartbeat(self, *, stalled: bool) -> Args:
        """The command that writes the worker's hash."""
        return self._heartbeat(stalled)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close its connection."""
        self._stop.set()
        if self._thread.is_alive():  # not so where the worker could not start
            self._thread.join(timeout=self._settings.socket_timeout_s + 1)
        self._link.close()

    def _run(self) -> None:
        every_s = self._settings.renew_every_s
        pause_s = every_s  # entries taken after the start are renewed within a third of the lease
        while not self._stop.wait(pause_s):
            started_s = time.monotonic()
            try:
                done = self._round(started_s)
            except Exception as error:  # noqa: BLE001  a thread that ends would let all leases run out, unseen
                self._alarms.renewal_failed(error)
                done = False
            took_s = time.monotonic() - started_s
            # After a failure soon again: there is a sixth of a lease until publishing stops.
            pause_s = max(every_s - took_s, 0.001) if done else every_s / 10

    def _round(self, now_s: float) -> bool:
        """One renewal of everything. False: try again soon."""
        stalled = self._leases.stalled(now_s)
        if stalled:
            self._alarms.stalled()
        if not self._link.ensure():
            return False
        batches = [] if stalled else self._batches()
        commands: list[Args] = [lua.call(lua.RENEW, (stream,), (self._worker, *ids)) for stream, ids in batches]
        commands += [self._heartbeat(stalled), (b"TIME",)]
        sent_s = time.monotonic()
        outcomes: list[Any] = self._link.exchange(commands)
        self._clock.set(outcomes[-1], sent_s)
        self._alarms.forbidden({each.code: each.message for each in outcomes if isinstance(each, Failed)})
        done = not stalled and not isinstance(outcomes[-1], Failed)
        for (stream, ids), outcome in zip(batches, outcomes, strict=False):
            if not isinstance(outcome, Failed):
                refs = [JobRef(stream, entry_id) for entry_id in ids]
                self._leases.renewed(refs, [each == 1 for each in outcome], sent_s)
            else:
                done = False
        if done:
            self._leases.rounds += 1
        self._wake()
        return done

    def _batches(self) -> list[tuple[str, list[str]]]:
        by_stream: defaultdict[str, list[str]] = defaultdict(list)
        for ref in self._leases.held():
            by_stream[ref.key].append(ref.entry_id)
        return [
            (stream, ids[first : first + _IDS_PER_SCRIPT])
            for stream, ids in by_stream.items()
            for first in range(0, len(ids), _IDS_PER_SCRIPT)
        ]
