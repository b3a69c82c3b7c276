"""The orderly end: finish what runs, hand over what does not get done in time. `docs/protocol.md`, "A worker", 7."""

from __future__ import annotations

import time

from .context import Context
from .control import Control
from .held import BEFORE_START, Stage
from .running import Running

_LEAST_PATIENCE_S = 2.0


class Drain:
    """Follows the requests to stop that reach the control."""

    def __init__(self, context: Context, control: Control, running: Running) -> None:
        self._context = context
        self._control = control
        self._running = running
        self._limit_s: float | None = None  # monotonic time from which what still runs is handed over
        self._give_up_s = float("inf")  # and from which this worker ends even if the server does not answer
        self._compared = False
        self.failed = False  # the engine cannot go on

    @property
    def is_on(self) -> bool:
        """Whether nothing is taken or begun any more."""
        return self._limit_s is not None

    def fail(self) -> None:
        """The engine cannot go on: hand everything over now."""
        self.failed = True
        self._start(0.0)

    def follow(self) -> None:
        """Do what the state of things asks for."""
        if self._control.num_stops > 0 and self._limit_s is None:
            self._start(self._context.settings.drain_timeout_s)
        if self._limit_s is None:
            return
        now_s = time.monotonic()
        if self._control.num_stops > 1:
            self._limit_s = min(self._limit_s, now_s)
        for held in self._context.memory.at(*BEFORE_START):
            held.stage = Stage.HAND_BACK  # not begun: nothing to release
        if now_s >= self._limit_s:
            patience_s = max(_LEAST_PATIENCE_S, 2 * self._context.settings.socket_timeout_s)
            self._give_up_s = min(self._give_up_s, now_s + patience_s)
            for held in self._context.memory.at(Stage.PREPARE, Stage.RUN):
                self._running.release(held)

    def _start(self, timeout_s: float) -> None:
        self._limit_s = min(self._limit_s or float("inf"), time.monotonic() + timeout_s)
        self._context.log.info("draining", worker=self._context.worker, running=len(self._context.memory))

    def is_done(self, *, comparing: bool) -> bool:
        """Whether the worker may end. `comparing`: the own pending list is being compared with memory."""
        if self._limit_s is None:
            return False
        if time.monotonic() >= self._give_up_s:
            self._context.log.error("ending with entries still held", num=len(self._context.memory))
            return True
        if len(self._context.memory) or comparing:
            return False
        if not self._compared:  # one last look: a delivery whose reply was lost is handed back too
            self._compared = True
            self._context.reconcile = True
            return False
        return True
