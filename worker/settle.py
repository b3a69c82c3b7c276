"""Carries entries from one part to the next, by what replies, renewals and the pool have shown."""

from __future__ import annotations

from typing import Any

from .begin import Beginner
from .context import Context
from .held import Held, Stage
from .outbox import Outbox
from .prepare import PreparePool
from .running import Running
from .start import Starter
from .writer import WriterState


class Settler:
    """The transitions between the parts; the parts themselves know nothing of each other's."""

    def __init__(
        self,
        context: Context,
        *,
        outbox: Outbox,
        beginner: Beginner,
        starter: Starter,
        running: Running,
        pool: PreparePool[Any],
    ) -> None:
        self._context = context
        self._outbox = outbox
        self._beginner = beginner
        self._starter = starter
        self._running = running
        self._pool = pool
        self._renewals = 0
        self._num_lost = 0

    def settle(self) -> None:
        """Carry entries on by what the last replies have shown of their chains."""
        memory = self._context.memory
        if self._outbox.take_trouble():
            for held in memory:
                if held.channel is not None and (writer := held.channel.writer).state is not WriterState.OPEN:
                    self._lost(held, writer.state, writer.error)
        for held in memory.at(Stage.START):
            if held.channel is not None and held.channel.writer.begun:
                self._starter.started(held)
        for held in memory.at(Stage.END):
            if held.channel is not None and held.channel.writer.complete:
                self._complete(held)

    def _complete(self, held: Held) -> None:
        if held.released:
            held.stage = Stage.HAND_BACK
            return
        self._context.counters.finished += 1
        self._outbox.acknowledge(held, held.dead)

    def _lost(self, held: Held, state: WriterState, error: str) -> None:
        counters, log = self._context.counters, self._context.log
        if state is WriterState.FENCED and held.stage is Stage.START:
            log.info("another entry came first: reading again", request=held.request_id)
            held.channel = None
            held.stage = Stage.READ
        elif state is WriterState.FENCED:
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

    def lease_news(self) -> None:
        """Take what the renewal thread has learnt: drop what is another's or gone."""
        leases = self._context.leases
        if leases.rounds != self._renewals:
            self._renewals = leases.rounds
            self._context.reconcile = True
        if leases.num_lost == self._num_lost:
            return
        self._num_lost = leases.num_lost
        for held in self._context.memory:
            if held.lease.lost:
                self._context.counters.lost_leases += 1
                self._context.log.warning("lost the lease", request=held.request_id, job=held.ref.entry_id)
                self._running.drop(held)

    def take_prepared(self) -> None:
        """Take results of the pool, unless their request was dropped, ended or handed over meanwhile."""
        for result in self._pool.done():
            held = result.ticket
            if isinstance(held, Held) and self._context.memory.has(held):
                if held.stage is Stage.DECODE:
                    self._beginner.decoded(held, result)
                elif held.stage is Stage.PREPARE:
                    self._starter.prepared(held, result)
