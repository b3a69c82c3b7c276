"""Waiting for jobs while there is nothing to do: a blocking read on a connection of its own."""

from __future__ import annotations

import time

from .cluster import AnyLink
from .connection import Failed
from .control import Control
from .errors import LinkError
from .inbox import Inbox

_WITHOUT_CONNECTION_S = 0.05


class Waiter:
    """A blocking read stays in flight when something else wakes the loop; its reply is taken whenever it comes."""

    def __init__(self, link: AnyLink, control: Control, inbox: Inbox, *, block_s: float, slack_s: float) -> None:
        self._link = link
        self._control = control
        self._inbox = inbox
        self._block_s = block_s
        self._slack_s = slack_s  # a reply that is later than the block by this much is not coming
        self._sent_s: float | None = None  # monotonic time of the read in flight

    def wait(self) -> None:
        """Wait until a job is there, the control wakes, or the time is over. Takes at most one job of each stream."""
        if self._sent_s is None and not self._send():
            self._control.wait(_WITHOUT_CONNECTION_S)
            return
        self.poll(self._block_s)

    def _send(self) -> bool:
        if not self._link.ensure():
            return False
        sent_s = time.monotonic()
        try:
            self._link.send(self._inbox.blocking_take(1, self._block_s))
        except LinkError:
            return False
        self._sent_s = sent_s
        return True

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take the reply of a read in flight, if there is one within the time."""
        if self._sent_s is None:
            return
        overdue_s = self._sent_s + self._block_s + self._slack_s
        if self._control.wait(timeout_s, self._link.fileno()):
            self._read(self._sent_s)
        elif time.monotonic() > overdue_s:
            self.cancel()

    def _read(self, sent_s: float) -> None:
        self._sent_s = None
        try:
            outcome = self._link.read()
        except LinkError as error:
            outcome = Failed("LOST", str(error))
        self._link.heed([outcome])
        self._inbox.blocking_taken(outcome, sent_s)

    def cancel(self) -> None:
        """Give up a read in flight. What it may have taken is found in the own pending list."""
        if self._sent_s is not None:
            self._sent_s = None
            self._inbox.blocking_taken(Failed("LOST", "given up"), time.monotonic())
        self._link.close()
