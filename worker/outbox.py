"""Everything that this worker writes: entries of requests' streams, acknowledgements, hand-backs.

Entries go out by compare-and-append, all due ones of all requests in one pipeline. The rules are those of
docs/protocol.md, "A worker", 3 and 6.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Any

from ..clients.events import ErrorInfo
from . import lua
from .batch import Batch
from .connection import Failed
from .context import Context
from .frame import frame_append
from .held import Channel, Held, Stage
from .writer import Append, WriterState

# Idle time of an entry handed back: above any lease, so that whoever looks for idle entries takes it at once.
HANDED_BACK_IDLE_MS = 365 * 86_400_000
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_OPEN = WriterState.OPEN  # a global is found faster than a member of an enumeration


class Outbox:
    """Sends what is due."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._kept: deque[tuple[float, Channel]] = deque()  # ended ones, until a lease after their end (monotonic)
        # Those of them whose ends the server may have lost. Only these are looked at in each turn: a worker ends
        # hundreds of short requests within a lease.
        self._repaired: list[tuple[float, Channel]] = []
        self._pause_s = 0.0
        self._not_before_s = 0.0
        self._last_not_before_s = 0.0  # the same for what comes last, acknowledgements and hand-backs
        self._refused = False  # the server did not take a write of the pipeline whose outcomes come in
        self._verified = True  # what the server has of all chains is known: acknowledgements may go out
        self._trouble = False  # a writer may have come to an end that is not its own
        self.out_of_memory = False  # the server refused a write for want of memory, and none has gone through since

    # --- what there is to write ---------------------------------------------------------------------------------------

    def start(self, held: Held, channel: Channel, payload: bytes) -> None:
        """Begin an attempt's chain with its `started`."""
        settings = self._context.settings
        # A stream of one's own making must not stay for a day if nothing follows; one that others wait on must not end.
        ttl_s = settings.queue_ttl_s if channel.writer.base_id else 2 * settings.lease_s
        channel.writer.add(payload, int(ttl_s * 1000))
        held.channel = channel
        held.stage = Stage.START

    def append(self, held: Held, payload: bytes, num_tokens: int = 0, terminal: bool = False) -> None:
        """Put an entry at the end of a request's chain."""
        channel = held.channel
        if channel is None:
            raise RuntimeError("an entry that has not begun cannot be written to")
        ttl_ms = 0
        if terminal:
            ttl_ms = int(self._context.settings.result_ttl_s * 1000)
        elif held.lease.renewals != channel.renewals:
            channel.renewals = held.lease.renewals
            ttl_ms = int(self._context.settings.queue_ttl_s * 1000)
        channel.writer.add(payload, ttl_ms, terminal, num_tokens)
        if terminal:
            self.end(held)

    def end(self, held: Held) -> None:
        """Nothing follows what is in the chain now."""
        if held.channel is None:
            raise RuntimeError("an entry that has not begun cannot end")
        held.channel.writer.ended = True
        held.stage = Stage.END

    # --- sending ------------------------------------------------------------------------------------------------------

    @property
    def is_blocked(self) -> bool:
        """Whether the server takes no writes at present."""
        return self._pause_s > 0

    def reconnected(self) -> None:
        """The connection is a new one: the last entry of everything kept is sent again, before any acknowledgement."""
        self._last_not_before_s = 0.0
        held = [held.channel for held in self._context.memory if held.channel is not None]
        for channel in (*held, *[channel for _, channel in self._kept]):
            channel.writer.reconnected()
            channel.not_before_s = channel.pause_s = 0.0
        self._keep_longer()
        self._repaired = list(self._kept)
        self._verified = False

    def _keep_longer(self) -> None:
        """What was still kept when the connection was lost is kept for a lease again, unless it expires before."""
        settings, now_s = self._context.settings, time.monotonic()
        longest_s = settings.result_ttl_s - self._keep_s
        self._kept = deque(
            (max(until_s, min(now_s + self._keep_s, until_s + longest_s)), channel) for until_s, channel in self._kept
        )

    @property
    def _keep_s(self) -> float:
        """How long ended ones are kept: what has expired by itself is not written again."""
        return min(self._context.settings.lease_s, self._context.settings.result_ttl_s)

    def take_trouble(self) -> bool:
        """Whether, since this was asked last, a writer may have come to an end that is not its own."""
        trouble, self._trouble = self._trouble, False
        return trouble

    def collect(self, batch: Batch, *, first: bool = True, is_whole: bool = True) -> None:
        """Add what is due to an empty pipeline.

        Where it is not the first of a turn, only what begins, ends or is repaired can have become due since.
        `is_whole`: every node is there; one that comes back may have lost the end of what is kept.
        """
        now_s = time.monotonic()
        while is_whole and self._kept and self._kept[0][0] <= now_s:
            self._kept.popleft()
        if now_s < self._not_before_s:
            return
        memory, leases = self._context.memory, self._context.leases
        appends = _Appends(batch, now_s)
        for held in memory if first else memory.at(Stage.START, Stage.END):
            if (channel := held.channel) is not None:
                # who may publish may begin
                may_write = leases.may_publish(held.lease, now_s) or (
                    held.stage is Stage.START and leases.may_begin(held.lease, now_s)
                )
                appends.collect(channel, may_write)
        self._collect_repairs(appends, now_s)
        self._trouble = self._trouble or appends.asks
        batch.add_run(appends.commands, partial(self._appended, appends.sent))
        self._verified = (self._verified or first) and appends.verified
        if self._verified and now_s >= self._last_not_before_s:
            self._collect_last(batch)
        if first and not len(batch):
            self._pause_s, self.out_of_memory = 0.0, False  # nothing is held up

    def _collect_repairs(self, appends: _Appends, now_s: float) -> None:
        self._repaired = [each for each in self._repaired if each[0] > now_s and each[1].writer.to_repair]
        for _, channel in self._repaired:
            appends.collect(channel, True)

    def is_repairing(self, request_id: str | None) -> bool:
        """Whether an answer that has ended is being written again, since the server may have lost its end.

        Its job may have come back with that. Whoever began it now would overtake the repair with another answer.
        """
        return any(channel.request_id == request_id and channel.writer.to_repair for _, channel in self._repaired)

    def _appended(self, sent: list[tuple[Channel, Append]], outcomes: list[Any]) -> None:
        now_s = time.monotonic()
        for (channel, append), outcome in zip(sent, outcomes, strict=True):
            if isinstance(outcome, Failed):
                self._note(outcome)
                if outcome.is_local and now_s >= channel.not_before_s:
                    channel.pause_s = _longer(channel.pause_s)
                    channel.not_before_s = now_s + channel.pause_s
            else:
                self.out_of_memory, self._pause_s, channel.pause_s = False, 0.0, 0.0
                if outcome[0] == 1:
                    channel.flag_seen_s = now_s
            if append.again:
                self._context.counters.resent += 1
            writer = channel.writer
            writer.reply(append.seq, outcome)
            if writer.state is not _OPEN:
                self._trouble = True

    def _note(self, outcome: Any) -> bool:
        """Remember what the outcome of a write says of the server. Whether there is a result."""
        if not isinstance(outcome, Failed):
            self.out_of_memory = False
            self._pause_s = 0.0
            return True
        self.out_of_memory = self.out_of_memory or outcome.code == "OOM"
        # A missing script is loaded at once.
        self._refused = self._refused or (outcome.again and not outcome.is_local and outcome.code != "NOSCRIPT")
        return False

    def sent(self) -> None:
        """All outcomes of a pipeline are in: after writes that the server did not take, pause."""
        if self._refused:
            self._refused = False
            self._pause_s = _longer(self._pause_s)
            self._not_before_s = time.monotonic() + self._pause_s
            self._context.counters.out_of_memory += self.out_of_memory

    # --- the end of an entry ------------------------------------------------------------------------------------------

    def _collect_last(self, batch: Batch) -> None:
        context = self._context
        for held in context.memory.at(Stage.ACKNOWLEDGE):
            if held.channel is not None and not held.channel.writer.is_settled:
                continue  # a failover may have taken the end of the stream back: it is being written again
            keys = (held.ref.key, context.keys.dead)
            args = (context.worker, held.ref.entry_id, *self._dead_fields(held))
            batch.add(lua.call(lua.ACKNOWLEDGE, keys, args), partial(self._acknowledged, held))
        for held in context.memory.at(Stage.HAND_BACK):
            if held.channel is not None and not held.channel.writer.is_settled:
                continue
            args = (context.worker, held.ref.entry_id, HANDED_BACK_IDLE_MS)
            batch.add(lua.call(lua.HAND_BACK, (held.ref.key,), args), partial(self._handed_back, held))

    def _dead_fields(self, held: Held) -> tuple[str | int, ...]:
        if held.dead is None:
            return ()
        num_attempts = len(held.history.attempts) + (held.channel is not None)
        message = held.dead.message + (f" ({held.dead.param})" if held.dead.param else "")
        return (
            *("reason", held.dead.code, "error", message, "attempts", num_attempts),
            *("worker", self._context.worker, "from", f"{held.ref.key} {held.ref.entry_id}"),
        )

    def _acknowledged(self, held: Held, outcome: Any) -> None:
        if self._put_off(held, outcome):
            return
        counters = self._context.counters
        if outcome == 1:
            counters.acknowledged += 1
            counters.dead_lettered += held.dead is not None
        self._done(held)

    def _handed_back(self, held: Held, outcome: Any) -> None:
        if self._put_off(held, outcome):
            return
        self._context.counters.handed_back += outcome == 1
        self._done(held)

    def _put_off(self, held: Held, outcome: Any) -> bool:
        """Whether an outcome is none. After an error that does not pass the entry is left pending."""
        if self._note(outcome):
            return False
        if outcome.is_local:
            self._last_not_before_s = time.monotonic() + _FIRST_PAUSE_S
        if not outcome.again:
            log = self._context.log
            log.error("cannot be acknowledged", request=held.request_id, job=held.ref.entry_id, error=outcome.code)
            self._context.leave_alone(held.ref, self._context.settings.lease_s)
            self._done(held)
        return True

    def _done(self, held: Held) -> None:
        if held.channel is not None and held.channel.writer.state is WriterState.OPEN:
            self._kept.append((time.monotonic() + self._keep_s, held.channel))
        self._context.memory.drop(held)

    def acknowledge(self, held: Held, dead: ErrorInfo | None = None) -> None:
        """The entry is to be acknowledged, with a copy to the dead-letter stream for the reason given."""
        held.dead = dead
        held.stage = Stage.ACKNOWLEDGE


def _longer(pause_s: float) -> float:
    return min(max(pause_s * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)


class _Appends:
    """The due entries of all channels, on their way into one pipeline."""

    def __init__(self, batch: Batch, now_s: float) -> None:
        self._batch = batch
        self._now_s = now_s
        self.commands: list[lua.Command] = []
        self.sent: list[tuple[Channel, Append]] = []  # one for each of the commands
        self.verified = True  # whether the last entries of all that can be written to are known to be in
        self.asks = False  # whether anybody's entries are to be read back

    def collect(self, channel: Channel, may_write: bool) -> None:
        """Add what is due of one channel."""
        if channel.not_before_s > self._now_s:
            return
        writer = channel.writer
        if writer.in_doubt:
            self.verified = self.verified and not writer.probing
            if writer.must_verify:
                first, self.asks = writer.id_of(0), True
                self._batch.add((b"XRANGE", channel.out, first, first), writer.verified)
                return
        if may_write:
            for append in writer.due():
                self.commands.append(frame_append(channel.frame_head, writer.field, append))
                self.sent.append((channel, append))
