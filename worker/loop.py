"""The step loop: one thread that publishes, takes, plans and steps, turn after turn.

    turn:  follow signals ─ lease news ─ prepared ─ exchange (a few round trips) ─ watch ─ step ─ publish
                                                                                     └─ or wait, if idle

Everything for the server goes into one pipeline a round trip. A turn beside a running engine takes one round trip, and
a few more only for entries that are being begun, so that a new request does not wait for a step at each of its stages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .batch import Batch
from .begin import Beginner
from .connection import AGAIN, Link
from .context import Context
from .control import Control
from .drain import Drain
from .held import BEFORE_START, Held, Stage
from .inbox import Inbox
from .outbox import Outbox
from .prepare import PreparePool
from .running import Running
from .start import Starter
from .waiter import Waiter
from .writer import WriterState

if TYPE_CHECKING:
    from ..engine.engine import Engine

_MOST_ROUNDS = 8
_SHORT_WAIT_S = 0.01
_STATS_EVERY_S = 0.2
_MOST_ENGINE_ERRORS = 3  # in a row
_BEGINNING = (Stage.READ, Stage.ASK, Stage.START)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop calls."""

    inbox: Inbox
    outbox: Outbox
    beginner: Beginner
    starter: Starter
    running: Running
    waiter: Waiter
    drain: Drain
    pool: PreparePool[Any]


class Loop:
    """Owns no rules: it calls the parts in order, and carries entries from one to the next."""

    def __init__(self, context: Context, engine: Engine, control: Control, link: Link, parts: Parts) -> None:
        self._context = context
        self._engine = engine
        self._control = control
        self._link = link
        self._inbox = parts.inbox
        self._outbox = parts.outbox
        self._beginner = parts.beginner
        self._starter = parts.starter
        self._running = parts.running
        self._waiter = parts.waiter
        self._drain = parts.drain
        self._pool = parts.pool
        self._generation = link.generation
        self._renewals = 0
        self._num_engine_errors = 0
        self._stats_s = 0.0

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
        if not self._engine.has_work or self._outbox.is_blocked or not self._link.is_connected:
            self._context.leases.progress()  # nothing can be computed, which is no stall of the engine
        self._drain.follow()
        if self._drain.is_on:
            self._waiter.cancel()
        else:
            self._waiter.poll()
            self._hand_back_surplus()
        self._lease_news()
        self._take_prepared()
        self._beginner.advance()
        self._exchange()
        self._running.watch()
        if not self._engine.has_work or self._outbox.is_blocked or not self._link.is_connected:
            self._wait()
        else:
            self._step()

    # --- the server ---------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        for number in range(_MOST_ROUNDS):
            if not self._link.ensure():
                return
            if self._link.generation != self._generation:
                self._new_connection()
            batch = Batch()
            self._collect(batch, first=number == 0)
            if not len(batch):
                return
            codes = batch.send(self._link)
            self._outbox.failed(codes)
            self._context.reconcile = self._context.reconcile or bool(codes - {"NOGROUP", "NOSCRIPT", "BUSYGROUP"})
            self._settle()
            if codes & AGAIN or (self._engine.has_work and not self._context.memory.at(*_BEGINNING)):
                return

    def _new_connection(self) -> None:
        self._generation = self._link.generation
        self._context.counters.reconnects += 1
        self._context.log.info("connected", worker=self._context.worker, connection=self._generation)
        self._outbox.reconnected()
        self._context.reconcile = True
        self._inbox.groups_missing = True

    def _collect(self, batch: Batch, *, first: bool) -> None:
        self._outbox.collect(batch)
        if first and self._inbox.groups_missing:
            self._inbox.collect_groups(batch)
        if not self._outbox.is_blocked:
            self._beginner.collect(batch)
            self._inbox.collect_own(batch)
        room = self._room()
        if room > 0:
            room -= self._inbox.collect_abandoned(batch, room)
        if first:
            self._running.collect(batch)
            if room > 0:
                self._inbox.collect_take(batch, room)

    def _room(self) -> int:
        """How many entries may be taken now."""
        if self._drain.is_on or self._outbox.out_of_memory or self._outbox.is_blocked or self._beginner.is_closed:
            return 0
        coming = len(self._context.memory.at(*BEFORE_START, Stage.START, Stage.PREPARE))
        return min(self._context.settings.take_limit, self._engine.room() - coming)

    def _hand_back_surplus(self) -> None:
        """A blocking read can give one job of each stream; what is beyond the room goes back at once."""
        fresh = self._context.memory.at(Stage.DECODE, Stage.READ)
        surplus = len(self._context.memory.at(*BEFORE_START, Stage.START, Stage.PREPARE)) - self._engine.room()
        for held in fresh[max(len(fresh) - surplus, 0) :] if surplus > 0 else ():
            held.stage = Stage.HAND_BACK

    # --- what replies have changed ------------------------------------------------------------------------------------

    def _settle(self) -> None:
        for held in self._context.memory:
            channel = held.channel
            if channel is None:
                continue
            writer = channel.writer
            if writer.state is not WriterState.OPEN:
                self._lost(held, writer.state, writer.error)
            elif held.stage is Stage.START and writer.begun:
                self._starter.started(held)
            elif held.stage is Stage.END and writer.complete:
                self._complete(held)

    def _complete(self, held: Held) -> None:
        if held.released:
            held.stage = Stage.HAND_BACK
            return
        self._context.counters.finished += 1
        self._outbox.acknowledge(held, held.dead)

    def _lost(self, held: Held, state: WriterState, error: str) -> None:
        counters, log = self._context.counters, self._context.log
        if state is WriterState.FENCED:
            counters.fenced += 1
            log.warning("fenced: another attempt goes on", request=held.request_id)
            self._running.drop(held)
            self._context.reconcile = True  # if the entry is still this worker's, it is begun anew
        elif state is WriterState.GONE:
            counters.gone += 1
            log.warning("the stream is gone", request=held.request_id)
            self._running.stop(held)
            held.channel = None
            self._outbox.acknowledge(held)
        else:
            counters.broken += 1
            log.error("cannot be written: left pending", request=held.request_id, error=error)
            self._context.leave_alone(held.ref, self._context.settings.lease_s)
            self._running.drop(held)

    def _lease_news(self) -> None:
        leases = self._context.leases
        if leases.rounds != self._renewals:
            self._renewals = leases.rounds
            self._context.reconcile = True
        for held in self._context.memory:
            if leases.of(held.ref).lost:
                self._context.counters.lost_leases += 1
                self._context.log.warning("lost the lease", request=held.request_id, job=held.ref.entry_id)
                self._running.drop(held)

    def _take_prepared(self) -> None:
        for result in self._pool.done():
            held = result.ticket
            if isinstance(held, Held) and self._context.memory.has(held):
                if held.stage is Stage.DECODE:
                    self._beginner.decoded(held, result)
                elif held.stage is Stage.PREPARE:
                    self._starter.prepared(held, result)

    # --- the engine ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        try:
            output = self._engine.step()
        except Exception as error:  # noqa: BLE001  whatever the model raises, its requests go to another worker
            self._engine_failed(error)
            return
        self._num_engine_errors = 0
        self._running.publish(output)
        if output.scheduled:
            self._context.leases.progress()
        else:
            self._control.wait(_SHORT_WAIT_S)  # nothing can run; renewals end if that lasts beyond the watchdog

    def _engine_failed(self, error: Exception) -> None:
        self._num_engine_errors += 1
        self._context.counters.engine_errors += 1
        self._context.log.error("a step failed", error=repr(error), in_a_row=self._num_engine_errors, exc_info=error)
        if self._num_engine_errors >= _MOST_ENGINE_ERRORS:
            self._drain.fail()
        else:
            self._control.wait(_SHORT_WAIT_S * 10**self._num_engine_errors)

    def _wait(self) -> None:
        if self._drain.is_on or len(self._context.memory) or self._inbox.is_busy or self._room() <= 0:
            self._control.wait(_SHORT_WAIT_S)
        elif not self._context.settings.burst:
            self._waiter.wait()
