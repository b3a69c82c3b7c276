"""The step loop: one thread that publishes, takes, plans and steps, turn after turn.

    turn:  follow signals ─ lease news ─ prepared ─ launch ─ publish the step before ─ round trips ─ watch ─ land
                    a short step:  launch ─ publish ─ send ─ land ─ take replies ─ first tokens ─ watch
                                               idle:  publish ─ round trips ─ wait

While the engine computes a step, what the one before gave is published: everything for the server goes into one
pipeline. After it there are round trips only for entries that are being begun, so that a new request does not wait for
a step at each of its stages. Then this thread helps with what is left of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from .batch import Batch
from .begin import Beginner
from .cluster import AnyLink
from .connection import AGAIN
from .context import Context
from .control import Control
from .drain import Drain
from .held import BEFORE_START, Stage
from .inbox import Inbox
from .janitor import Janitor
from .outbox import Outbox
from .running import Running
from .settle import Settler
from .waiter import Waiter

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.types import StepOutput

T = TypeVar("T")
_MOST_ROUNDS = 8
_SHORT_WAIT_S = 0.01
_STATS_EVERY_S = 0.2
_MOST_ENGINE_ERRORS = 3  # in a row
_SHORT_STEP_S = 0.002  # so long, about, as the replies of a turn take to come and be handled
_BEGINNING = (Stage.READ, Stage.ASK, Stage.START)
_COMING = (*BEFORE_START, Stage.START, Stage.PREPARE)  # to the engine


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop calls."""

    inbox: Inbox
    outbox: Outbox
    beginner: Beginner
    running: Running
    settler: Settler
    waiter: Waiter
    drain: Drain
    janitor: Janitor


class Loop:
    """Owns no rules: it calls the parts in order, and carries entries from one to the next."""

    def __init__(self, context: Context, engine: Engine, control: Control, link: AnyLink, parts: Parts) -> None:
        self._context = context
        self._engine = engine
        self._control = control
        self._link = link
        self._inbox = parts.inbox
        self._outbox = parts.outbox
        self._beginner = parts.beginner
        self._running = parts.running
        self._settler = parts.settler
        self._waiter = parts.waiter
        self._drain = parts.drain
        self._janitor = parts.janitor
        self._generation = link.generation
        self._num_engine_errors = 0
        self._stats_s = 0.0
        self._output: StepOutput | None = None  # not published yet
        self._step_s = 0.0  # how long the last one took, from launch to landing

    def run(self) -> bool:
        """Work until asked to stop, or, in a burst, until nothing is left. False: the engine failed."""
        while not self._is_done():
            self.turn()
        return not self._drain.failed

    def _is_done(self) -> bool:
        if self._drain.is_on:
            return self._drain.is_done(comparing=self._inbox.is_comparing)
        nothing_left = self._inbox.took_nothing and self._inbox.swept_empty and not self._inbox.is_comparing
        return self._context.settings.burst and nothing_left and not len(self._context.memory)

    def turn(self) -> None:
        """One turn."""
        if (now_s := time.monotonic()) - self._stats_s > _STATS_EVERY_S:
            self._stats_s = now_s
            self._context.stats = self._engine.stats()
        if not self._may_step:
            self._context.leases.progress()  # nothing can be computed, which is no stall of the engine
        self._drain.follow()
        if self._drain.is_on:
            self._waiter.cancel()
        else:
            self._waiter.poll()
            self._hand_back_surplus()
        self._settler.lease_news()
        self._settler.take_prepared()
        self._beginner.advance()
        if self._may_step:
            self._step()
        else:
            self._publish()
            self._exchange(first=True)
            if not self._may_step:
                self._wait()
            self._running.watch()

    def _publish(self) -> None:
        """What the last step gave."""
        output, self._output = self._output, None
        if output is not None:
            self._running.publish(output)

    @property
    def _may_step(self) -> bool:
        """Whether there is something to compute, and what comes of it can be told."""
        return self._engine.has_work and not self._outbox.is_blocked and self._link.is_connected

    # --- the server ---------------------------------------------------------------------------------------------------

    def _send(self) -> Batch | None:
        """Send what there is to send; the server works on it while the engine computes."""
        if not self._link.ensure():
            return None
        if self._link.generation != self._generation:
            self._new_connection()
        batch = Batch()
        self._collect(batch, first=True)
        batch.send(self._link)
        return batch

    def _finish(self, batch: Batch | None) -> bool:
        """Take the replies. Whether the server has taken everything."""
        if batch is None:
            return False
        codes = batch.finish(self._link)
        self._outbox.sent()
        self._context.reconcile = self._context.reconcile or bool(codes.keys() - {"NOGROUP", "NOSCRIPT", "BUSYGROUP"})
        self._context.alarms.forbidden(codes)
        self._settler.settle()
        return not codes.keys() & AGAIN

    def _exchange(self, *, first: bool) -> None:
        """Round trips until nothing is left to send, or nothing of which a step need not wait."""
        for _ in range(_MOST_ROUNDS):
            if not self._link.ensure():
                return
            if self._link.generation != self._generation:
                self._new_connection()
            batch = Batch()
            self._collect(batch, first=first)
            if not len(batch):
                return
            first = False
            batch.send(self._link)
            if not self._finish(batch) or (self._engine.has_work and not self._context.memory.num_at(*_BEGINNING)):
                return

    def _new_connection(self) -> None:
        self._generation = self._link.generation
        self._context.counters.reconnects += 1
        self._context.log.info("connected", worker=self._context.worker, connection=self._generation)
        self._outbox.reconnected()
        self._beginner.reconnected()
        self._context.reconcile = True
        self._inbox.groups_missing = True

    def _collect(self, batch: Batch, *, first: bool) -> None:
        if not self._drain.is_on and not self._outbox.is_blocked:
            self._beginner.begin_new()
        self._outbox.collect(batch, first=first, is_whole=self._link.is_whole)
        if first and self._inbox.groups_missing:
            self._inbox.collect_groups(batch)
        if not self._outbox.is_blocked:
            if not self._drain.is_on:
                self._beginner.collect(batch)
            self._inbox.collect_own(batch)
        room = self._room() if first or self._inbox.has_abandoned else 0
        if room > 0:
            room -= self._inbox.collect_abandoned(batch, room)
        if first:
            self._running.collect(batch)
            self._janitor.collect(batch)
            if room > 0:
                self._inbox.collect_take(batch, room)

    def _room(self) -> int:
        """How many entries may be taken now."""
        if self._drain.is_on or self._outbox.out_of_memory or self._outbox.is_blocked or self._beginner.is_closed:
            return 0
        room = self._engine.room()
        return min(self._context.settings.take_limit, room - self._context.memory.num_at(*_COMING)) if room else 0

    def _hand_back_surplus(self) -> None:
        """A blocking read can give one job of each stream; what is beyond the room goes back at once."""
        fresh = self._context.memory.at(Stage.DECODE, Stage.READ)
        if fresh and (surplus := self._context.memory.num_at(*_COMING) - self._engine.room()) > 0:
            for held in fresh[max(len(fresh) - surplus, 0) :]:
                held.stage = Stage.HAND_BACK

    # --- the engine ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Have a step computed, and meanwhile publish the one before."""
        launched_s = time.monotonic()
        launched = self._engine_does(self._engine.launch)
        self._publish()
        batch = self._send()
        # A short step is over when the replies are in: this thread helps with it rather than wait for them.
        if is_short := self._step_s < _SHORT_STEP_S:
            self._land(launched, launched_s)
        self._finish(batch)
        if is_short and self._brings_first():
            self._publish()
            self._exchange(first=True)
        elif self._context.memory.num_at(*_BEGINNING):
            self._exchange(first=False)
        self._running.watch()
        if not is_short:
            self._land(launched, launched_s)

    def _brings_first(self) -> bool:
        """Whether what was computed holds the first token of a choice, for which somebody waits the most."""
        return self._output is not None and any(each.index == 0 for each in self._output.outputs)

    def _land(self, launched: bool | None, launched_s: float) -> None:
        """Help with the step that was launched until it is done. None: the launch failed."""
        if launched:
            self._output = self._engine_does(self._engine.land)
            self._step_s = time.monotonic() - launched_s
            if self._output is not None:
                self._num_engine_errors = 0
                self._context.leases.progress()
        elif launched is not None:
            self._control.wait(_SHORT_WAIT_S)  # nothing can run; renewals end if that lasts beyond the watchdog

    def _engine_does(self, call: Callable[[], T]) -> T | None:
        """None if it failed."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001  whatever the model raises, its requests go to another worker
            self._engine_failed(error)
            return None

    def _engine_failed(self, error: Exception) -> None:
        self._num_engine_errors += 1
        self._context.counters.engine_errors += 1
        self._context.log.error("a step failed", error=repr(error), in_a_row=self._num_engine_errors, exc_info=error)
        if self._num_engine_errors >= _MOST_ENGINE_ERRORS:
            self._drain.fail()
        else:
            self._control.wait(_SHORT_WAIT_S * 10**self._num_engine_errors)

    def _wait(self) -> None:
        inbox = self._inbox
        if self._drain.is_on or len(self._context.memory) or inbox.is_busy or inbox.is_paused or self._room() <= 0:
            self._control.wait(_SHORT_WAIT_S)
        elif self._context.settings.burst:
            self._control.wait(0.0)  # nothing is waited for: the next turn looks whether anything is left
        else:
            self._waiter.wait()
