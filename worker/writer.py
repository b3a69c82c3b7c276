"""The write side of one attempt: a chain of entries, each naming its predecessor, and what every reply means for it.

Pure: it knows neither sockets nor Redis. `due` says which entries to send now; `reply`, `verified` and `reconnected`
are told what came back. The rules are those of docs/protocol.md, "A worker", 3; sending an entry again is always
right, because the server compares before it appends.

    entries   0 ……………… confirmed ……………… sent ……………… len(payloads)
              known to be in       in flight         not sent yet

What is kept of an entry is its payload, as one list; what only few entries have lies beside it. Hundreds of requests
keep hundreds of entries each, which as objects of their own would cost Python's collector a walk over all of them.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from .connection import Failed


class WriterState(Enum):
    """Whether an attempt may write."""

    OPEN = "open"
    FENCED = "fenced"  # the stream goes on without this attempt: no further write, no acknowledgement
    GONE = "gone"  # the stream that was there at begin is not there any more: acknowledge
    BROKEN = "broken"  # an error that does not pass: drop, leave the entry pending


_OPEN = WriterState.OPEN  # a global is found faster than a member of an enumeration


class Append(NamedTuple):
    """One compare-and-append to send: sent again, it is the same byte for byte."""

    seq: int
    previous_id: bytes  # what must be the newest id; empty for no stream
    entry_id: bytes
    payload: bytes
    ttl_ms: int  # 0: leave the stream's TTL as it is
    clears_flag: bool  # delete the cancel flag with it (the terminal entry)
    again: bool  # it was sent before


class Writer:
    """One attempt's chain. `base_id`: newest id read at begin, empty for no stream; `attempt_ms`: the A of its ids."""

    def __init__(self, base_id: bytes, attempt_ms: int, field: bytes) -> None:
        self.base_id = base_id
        self.attempt_ms = attempt_ms
        self.field = field
        self.payloads: list[bytes] = []
        self._ttls_ms: dict[int, int] = {}  # of the entries that set the stream's TTL
        self._clearing = -1  # the entry that deletes the cancel flag, if there is one
        self._settling = -1  # the first entry that settles a token, if there is one
        self.confirmed = 0  # entries [0, confirmed) are known to be in
        self.sent = 0  # entries [confirmed, sent) are in flight
        self._tried = 0  # entries [0, tried) were sent at least once
        self._last_seq = -1  # of the entry sent last
        self._last_id: bytes = base_id
        self.state = WriterState.OPEN
        self.ended = False  # the last entry of the chain is the last that this attempt will write
        self.cancelled = False  # a reply has shown the cancel flag
        self._probing = False  # the connection is new: the last entry is to be sent again, or its reply is not in
        self.error = ""  # of BROKEN
        self._claim: int | None = None  # the server says that the newest entry is this one of ours: to be verified

    def add(self, payload: bytes, ttl_ms: int = 0, clears_flag: bool = False, num_tokens: int = 0) -> None:
        """Put an entry at the end of the chain; `num_tokens` is how many it settles. For the rest see `Append`."""
        seq = len(self.payloads)
        self.payloads.append(payload)
        if ttl_ms:
            self._ttls_ms[seq] = ttl_ms
        if clears_flag:
            self._clearing = seq
        if num_tokens and self._settling < 0:
            self._settling = seq

    def id_of(self, seq: int) -> bytes:
        """Entry id `A-K`; for seq -1 the id that the chain is built on."""
        return b"%d-%d" % (self.attempt_ms, seq) if seq >= 0 else self.base_id

    @property
    def begun(self) -> bool:
        """Whether `started` is known to be in."""
        return self.confirmed > 0

    @property
    def complete(self) -> bool:
        """Whether all that this attempt will write is known to be in."""
        return self.state is WriterState.OPEN and self.ended and self.confirmed == len(self.payloads)

    @property
    def is_settled(self) -> bool:
        """Whether it is complete, and nothing has happened since by which the server may have lost its end."""
        return self.complete and not self.in_doubt

    @property
    def probing(self) -> bool:
        """Whether it is open, after a new connection, what of this chain the server has."""
        return self._probing and self.state is WriterState.OPEN

    @property
    def to_repair(self) -> bool:
        """Whether the server may lack the end of this chain, and may be given it again."""
        return self.state is WriterState.OPEN and (self._probing or not self.complete)

    @property
    def in_doubt(self) -> bool:
        """Whether what the server has of this chain is not known for sure: `probing`, or `must_verify`."""
        return self._probing or self._claim is not None

    @property
    def must_verify(self) -> bool:
        """Whether `started` is to be read back, to see whether entries with this attempt's ids are really its own."""
        return self._claim is not None and self.state is WriterState.OPEN

    @property
    def has_settled(self) -> bool:
        """Whether a token of this attempt is known to be in."""
        return 0 <= self._settling < self.confirmed

    def due(self) -> list[Append]:
        """The entries to send now; they count as sent. Nothing follows `started`, or a probe, before its reply."""
        first, end = self.sent, len(self.payloads)
        if not self.confirmed or self._probing:
            end = min(max(self.confirmed, 1), end)
        if first >= end or self.state is not _OPEN or self._claim is not None:
            return []
        previous_id = self._last_id if first == self._last_seq + 1 else self.id_of(first - 1)
        appends: list[Append] = []
        for seq in range(first, end):
            entry_id: bytes = b"%d-%d" % (self.attempt_ms, seq)
            ttl_ms, clears_flag = self._ttls_ms.get(seq, 0), seq == self._clearing
            appends.append(
                Append(seq, previous_id, entry_id, self.payloads[seq], ttl_ms, clears_flag, seq < self._tried)
            )
            previous_id = entry_id
        self.sent, self._last_seq, self._last_id = end, end - 1, previous_id
        self._tried = max(self._tried, end)
        return appends

    def reply(self, seq: int, outcome: Any) -> None:
        """Take the outcome of sending entry `seq`: `[1, flag]`, `[0, newest id]`, or `Failed`."""
        if self.state is not _OPEN:
            return
        if isinstance(outcome, Failed):
            self._failed(seq, outcome)
            return
        status, detail = outcome
        if status == 1:
            if seq >= self.confirmed:
                self.confirmed = seq + 1
            if detail == 1:
                self.cancelled = True
            self._probing = False
        else:
            self._refused(bytes(detail))

    def _failed(self, seq: int, outcome: Failed) -> None:
        if outcome.again:
            self.sent = min(self.sent, seq)
        else:
            self.state = WriterState.BROKEN
            self.error = f"{outcome.code} {outcome.message}"

    def _refused(self, newest: bytes) -> None:
        seq = self._seq_of(newest)
        if seq is not None:
            self._claim = seq
        elif newest == self.base_id:
            # All of this attempt is gone (lost in a failover, or its stream of two leases has expired): from the start.
            self.confirmed = self.sent = 0
            self._probing = False
        else:
            self.state = WriterState.FENCED if newest else WriterState.GONE

    def _seq_of(self, newest: bytes) -> int | None:
        """Which entry of this chain has that id, if one may have."""
        attempt, _, seq = newest.partition(b"-")
        if not newest or int(attempt) != self.attempt_ms or int(seq) >= len(self.payloads):
            return None
        return int(seq)

    def verified(self, outcome: Any) -> None:
        """Take what `XRANGE out A-0 A-0` has given, asked for because of `must_verify`.

        Two workers can choose the same A in the same millisecond; only the bytes of `started` tell whose it is.
        """
        if self._claim is None or self.state is not WriterState.OPEN:
            return
        if isinstance(outcome, Failed):
            if not outcome.again:
                self.state = WriterState.BROKEN
                self.error = f"{outcome.code} {outcome.message}"
            return
        claim, self._claim = self._claim, None
        self._probing = False
        if outcome and list(outcome[0][1]) != [self.field, self.payloads[0]]:
            self.state = WriterState.FENCED
        elif outcome or self.begun:  # begun: it was seen in before, and someone has deleted it since
            self.confirmed = self.sent = claim + 1
        else:
            self.sent = 0

    def reconnected(self) -> None:
        """The connection is a new one: nothing is in flight, and the last entry known to be in is to be sent again.

        What the server said of its newest entry is not to be verified any more: this one may be behind that.
        """
        if self.state is WriterState.OPEN and self.payloads:
            self.sent = max(self.confirmed - 1, 0)
            self._probing, self._claim = True, None
