"""Takes the names of dead workers off the queue. A crash leaves its consumer in the groups, for ever if nobody looks.

A consumer goes only if nothing is pending for it, by the script that checks just that, and only long after its worker
showed no more sign of life. One that lives after all loses nothing: the next read makes its consumer anew.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from ..clients.keys import GROUP, is_valid_id
from . import lua
from .batch import Batch
from .connection import Failed
from .context import Context

HANDED_BACK = "-"  # the consumer of entries that wait for a worker; not a worker's
_IDLE_LEASES = 10  # a consumer idle for so many leases may be a dead worker's


class Janitor:
    """Looks now and then."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._next_s = time.monotonic() + context.settings.janitor_every_s
        self._suspects: set[str] = set()
        self._dead: list[str] = []

    def collect(self, batch: Batch) -> None:
        """Add what it wants to know, or to do, to a pipeline."""
        keys, suspects = self._context.keys, self._suspects
        self._suspects = set()
        for name in suspects:
            if is_valid_id(name):  # else it is no worker's, whoever's it is
                batch.add((b"EXISTS", keys.worker(name)), partial(self._lives, name))
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._context.settings.janitor_every_s
            for stream in keys.all_jobs:
                batch.add((b"XINFO", b"CONSUMERS", stream, GROUP), self._found)
        for name in self._dead:
            batch.add(lua.call(lua.LEAVE, keys.all_jobs, (name,)), _done)
        self._dead = []

    def _found(self, outcome: Any) -> None:
        if isinstance(outcome, Failed):
            return
        least_idle_ms = self._context.settings.lease_s * _IDLE_LEASES * 1000
        for row in outcome:
            fields = dict(zip(row[::2], row[1::2], strict=True))
            name = fields[b"name"].decode("utf-8", "replace")
            idle_ms, pending = int(fields[b"idle"]), int(fields[b"pending"])
            if name not in {HANDED_BACK, self._context.worker} and not pending and idle_ms > least_idle_ms:
                self._suspects.add(name)

    def _lives(self, name: str, outcome: Any) -> None:
        if outcome == 0:
            self._context.log.info("a dead worker's name is taken off the queue", dead=name)
            self._dead.append(name)


def _done(_outcome: Any) -> None:
    """Whether it went or still had entries: the next look tells."""
