"""From an entry just taken to the decision what to do with it: decode, read its stream, decide, wait for its turn.

Each entry goes from stage to stage by what replies say. The rules are those of docs/protocol.md, "A worker", 2 and 5.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from ..clients.errors import InvalidJobError, MalformedEntryError
from ..clients.job import Job, decode_job
from ..clients.keys import GROUP
from .attempt import Acknowledge, AskWhetherPending, Begin, Facts, HandBack, decide
from .batch import Batch
from .connection import Failed
from .context import Context
from .held import BEGUN, Held, Stage
from .history import read_history
from .outbox import Outbox
from .prepare import Prepared, PreparePool
from .start import Starter

_ENTRIES_PER_READ = 500
_SMALL_PAYLOAD_BYTES = 1 << 16  # up to here decoding takes less time than handing it to a thread and back is worth
_FOREIGN_PAUSE_S = 10.0  # how long a worker leaves alone what it handed back for its model


class Beginner:
    """Brings entries to where they are acknowledged, handed back, or begun."""

    def __init__(self, context: Context, outbox: Outbox, starter: Starter, pool: PreparePool[Any]) -> None:
        self._context = context
        self._outbox = outbox
        self._starter = starter
        self._pool = pool

    # --- decode -------------------------------------------------------------------------------------------------------

    def decode(self, held: Held) -> None:
        """Decode an entry's payload, here if it is small."""
        work = partial(self._decoded, held)
        if len(held.payload) <= _SMALL_PAYLOAD_BYTES:
            self._take_decoded(held, work())
        else:
            self._pool.submit(held, work)

    def _decoded(self, held: Held) -> Job | InvalidJobError:
        try:
            return decode_job(held.payload, held.kind, max_bytes=self._context.settings.max_payload_bytes)
        except InvalidJobError as error:
            return error

    def decoded(self, held: Held, result: Prepared[Any]) -> None:
        """Take what the pool has made of a large payload."""
        failure = InvalidJobError("internal", "decoding took too long")
        self._take_decoded(held, failure if result.value is None else result.value)

    def _take_decoded(self, held: Held, decoded: Job | InvalidJobError) -> None:
        if isinstance(decoded, Job):
            held.job = decoded
        else:
            held.failure = decoded
        held.stage = Stage.READ

    # --- begin unread -------------------------------------------------------------------------------------------------

    def begin_new(self) -> None:
        """Begin what can be taken to have no stream yet."""
        for held in self._context.memory.at(Stage.READ):
            if held.is_new and self._has_no_stream(held):
                begin = Begin(attempt_ms=self._context.clock.now_ms(), number=1, base_id=b"", alone=False)
                self._starter.start(held, begin)
            held.is_new = False  # if it was not true, its stream is read

    def _has_no_stream(self, held: Held) -> bool:
        """Whether a bare job that comes for the first time may be begun: its `started` only goes in on no stream."""
        if held.job is None or held.fp is not None:
            return False
        clock, outbox = self._context.clock, self._outbox
        return clock.is_fresh(time.monotonic()) and not outbox.is_repairing(held.request_id) and self._may_begin(held)

    # --- read and decide ----------------------------------------------------------------------------------------------

    def collect(self, batch: Batch) -> None:
        """Add to a pipeline what entries on their way need to know."""
        memory, keys = self._context.memory, self._context.keys
        to_read = [held for held in memory.at(Stage.READ) if not self._outbox.is_repairing(held.request_id)]
        if to_read:
            batch.add((b"TIME",), partial(self._time, time.monotonic()))
        for held in to_read:
            start = b"(" + held.entries[-1][0] if held.entries else b"-"
            out = keys.out(held.request_id or "")
            batch.add((b"XRANGE", out, start, b"+", b"COUNT", _ENTRIES_PER_READ), partial(self._read, held))
        for held in memory.at(Stage.ASK):
            if held.other is not None:
                other = held.other
                batch.add(
                    (b"XPENDING", other.key, GROUP, other.entry_id, other.entry_id, 1), partial(self._asked, held)
                )

    def reconnected(self) -> None:
        """The connection is a new one: what was read on the last one is read again, above all before acknowledging.

        A failover may have taken back what the decision was made from.
        """
        for held in self._context.memory.at(Stage.READ, Stage.ASK, Stage.ACKNOWLEDGE):
            if held.channel is None and held.request_id is not None:
                held.entries, held.dead = [], None
                held.stage = Stage.READ

    def _time(self, sent_s: float, outcome: Any) -> None:
        self._context.clock.set(outcome, sent_s)

    def _read(self, held: Held, outcome: Any) -> None:
        if isinstance(outcome, Failed):
            if not outcome.again:
                self._unreadable(held, outcome.code)
            return
        held.entries += [(entry_id, dict(zip(pairs[::2], pairs[1::2], strict=True))) for entry_id, pairs in outcome]
        if len(outcome) == _ENTRIES_PER_READ:
            return  # there is more
        entries, held.entries = held.entries, []
        try:
            held.history = read_history(entries, held.request_id or "")
        except MalformedEntryError as error:
            self._unreadable(held, error.reason)
            return
        self._decide(held, None)

    def _unreadable(self, held: Held, why: str) -> None:
        self._context.counters.broken += 1
        self._context.log.error("the stream cannot be read: left pending", request=held.request_id, why=why)
        self._context.leave_alone(held.ref, self._context.settings.lease_s)
        self._context.memory.drop(held)

    def _asked(self, held: Held, outcome: Any) -> None:
        if isinstance(outcome, Failed):
            if not outcome.again:  # no such stream or group, or no stream at all
                self._decide(held, False)
            return
        self._decide(held, bool(outcome))

    def _decide(self, held: Held, other_pending: bool | None) -> None:
        context = self._context
        facts = Facts(
            job=held.ref,
            payload_sha=held.payload_sha,
            fp=held.fp,
            history=held.history,
            now_ms=context.clock.now_ms(),
            fingerprint=context.model.fingerprint,
            other_pending=other_pending,
        )
        decision = decide(facts, context.rules)
        match decision:
            case Acknowledge():
                context.counters.duplicates += decision.why == "duplicate"
                context.log.info("nothing to do", request=held.request_id, why=decision.why)
                self._outbox.acknowledge(held, decision.dead)
            case AskWhetherPending():
                held.other = decision.job
                held.stage = Stage.ASK
            case HandBack():
                context.log.info("begun with another model: handed back", request=held.request_id)
                context.leave_alone(held.ref, _FOREIGN_PAUSE_S)
                held.stage = Stage.HAND_BACK
            case Begin():
                context.memory.set_alone(held, decision.alone and decision.refusal is None)
                if decision.refusal is not None or self._may_begin(held):
                    self._starter.start(held, decision)
                else:
                    held.stage = Stage.WAIT

    # --- whose turn it is ---------------------------------------------------------------------------------------------

    def _may_begin(self, held: Held) -> bool:
        """Whether a request may be begun beside those that are. One to be run alone goes before all others."""
        memory = self._context.memory
        if not self._context.leases.may_begin(held.lease, time.monotonic()):
            return False
        if held.alone:
            return not any(each is not held for each in memory.at(*BEGUN))
        # no other that must be alone waits for its turn, or runs and has settled nothing yet
        return not any(
            each.stage in {Stage.WAIT, Stage.READ, Stage.ASK} or (each.stage in BEGUN and not _has_settled(each))
            for each in memory.alone()
        )

    def advance(self) -> None:
        """Let those go on that wait for their turn: their streams are read anew."""
        for held in self._context.memory.at(Stage.WAIT):
            if self._may_begin(held):
                held.stage = Stage.READ

    @property
    def is_closed(self) -> bool:
        """Whether nothing may be begun at present, so that nothing should be taken either."""
        return any(
            each.stage is Stage.WAIT or (each.stage in BEGUN and not _has_settled(each))
            for each in self._context.memory.alone()
        )


def _has_settled(held: Held) -> bool:
    return held.channel is not None and held.channel.writer.has_settled
