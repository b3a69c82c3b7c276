"""A job entry, from when it is this worker's until it is acknowledged or another's, and the table of all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from ..clients.errors import InvalidEntryError, InvalidJobError, shown_name
from ..clients.events import ErrorInfo, JobRef
from ..clients.job import Job, decode_entry
from ..clients.payload import Kind
from .answer import Answer
from .attempt import Begin
from .frame import frame_head
from .history import History, RawEntry
from .lease import Lease, Leases
from .writer import Writer


class Stage(IntEnum):
    """How far an entry has come. The numbers count from 0: `Memory` keeps a list by stage."""

    DECODE = 0  # a large payload is being decoded in the pool
    READ = 1  # its stream is to be read
    ASK = 2  # whether the last attempt's entry is still pending is to be asked
    WAIT = 3  # may not be begun beside what runs, or its lease is in doubt; read again when it may
    START = 4  # `started` is on its way
    PREPARE = 5  # being rendered and tokenised
    RUN = 6  # the engine has it
    END = 7  # all is written, not all of it is known to be in
    ACKNOWLEDGE = 8
    HAND_BACK = 9


BEFORE_START = frozenset({Stage.DECODE, Stage.READ, Stage.ASK, Stage.WAIT})
BEGUN = frozenset({Stage.START, Stage.PREPARE, Stage.RUN})


@dataclass(slots=True)
class Channel:
    """A request's stream as one attempt writes it. Outlives the entry by a lease, to repair what a failover loses."""

    request_id: str
    out: str
    cancel: str
    writer: Writer
    flag_seen_s: float = 0.0  # monotonic time at which a reply last told whether the request is cancelled
    renewals: int = -1  # of the lease, when the stream's TTL was last set; -1: not since `started`
    not_before_s: float = 0.0  # monotonic time; until then nothing is sent, for its slot or node could take nothing
    pause_s: float = 0.0  # how long that was the last time; 0: all is well
    frame_head: bytes = field(init=False)  # what each of its appends begins with on the wire

    def __post_init__(self) -> None:
        self.frame_head = frame_head(self.out, self.cancel)


@dataclass(slots=True, eq=False)
class Held:
    """One job entry in memory. Compared by identity."""

    ref: JobRef
    _stage: Stage
    lease: Lease = field(default_factory=lambda: Lease(0.0))  # set when memory takes it
    request_id: str | None = None  # None: the entry has no valid id
    kind: Kind = "d"
    payload: bytes = b""
    fp: str | None = None  # the entry's own field
    failure: InvalidJobError | None = None  # remembered, and told only when the request has begun
    job: Job | None = None
    entries: list[RawEntry] = field(default_factory=list[RawEntry])  # of the request's stream, read so far
    history: History = field(default_factory=History)
    other: JobRef | None = None  # in stage ASK: the entry asked about
    begin: Begin | None = None
    seed: int = 0
    alone: bool = False  # two attempts were charged: run apart from all others
    channel: Channel | None = None
    answer: Answer | None = None
    dead: ErrorInfo | None = None  # the acknowledgement copies the job to the dead-letter stream
    is_new: bool = False  # delivered for the first time, and its stream not asked about yet
    released: bool = False  # `released` is written: hand back once it is in
    deadline_ms: int | None = None  # server's clock
    flush_at_s: float = 0.0  # monotonic time before which what is held back of its tokens stays so
    by_stage: list[dict[Held, None]] | None = None  # of the memory that holds it

    @property
    def stage(self) -> Stage:
        """How far it has come."""
        return self._stage

    @stage.setter
    def stage(self, stage: Stage) -> None:
        if self.by_stage is not None:
            del self.by_stage[self._stage][self]
            self.by_stage[stage][self] = None
        self._stage = stage

    @property
    def engine_id(self) -> str:
        """The request as the engine knows it: another one with each attempt, since an abort may take a step."""
        return f"{self.request_id}#{self.begin.attempt_ms if self.begin else 0}"

    @property
    def entry_ms(self) -> int:
        """When the job was added, on the server's clock."""
        return int(self.ref.entry_id.partition("-")[0])

    @property
    def trace(self) -> dict[str, str]:
        """What log lines about the request also say: the caller's trace, if it named one."""
        traceparent = self.job.traceparent if self.job is not None else None
        return {} if traceparent is None else {"traceparent": traceparent}

    @property
    def payload_sha(self) -> str:
        """SHA-256 of the payload in hex."""
        return hashlib.sha256(self.payload).hexdigest()


def new_held(ref: JobRef, pairs: list[bytes] | None) -> Held:
    """An entry as the server gave it: names and values in turn; None for one that was deleted while pending."""
    if pairs is None:
        return Held(ref, Stage.ACKNOWLEDGE)
    fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
    try:
        entry = decode_entry(fields)
        if len(fields) * 2 != len(pairs):
            raise _twice(pairs, entry.id, entry.kind)
    except InvalidEntryError as error:
        kind: Kind = "json" if error.kind == "json" else "d"
        payload = fields.get(b"json" if kind == "json" else b"job", b"")
        held = Held(ref, Stage.READ, request_id=error.id, kind=kind, payload=payload, failure=error)
        if error.id is None:
            held.stage = Stage.ACKNOWLEDGE
            held.dead = ErrorInfo(error.code, error.message, error.param)
        return held
    return Held(ref, Stage.DECODE, request_id=entry.id, kind=entry.kind, payload=entry.payload, fp=entry.fp)


def _twice(pairs: list[bytes], request_id: str, kind: Kind) -> InvalidEntryError:
    names = pairs[::2]
    name = next(each for each in names if names.count(each) > 1)
    return InvalidEntryError("given twice", shown_name(name.decode("utf-8", "backslashreplace")), request_id, kind)


class Memory:
    """All entries held, in the order in which they came. What is in here is renewed, and nothing else."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._held: dict[JobRef, Held] = {}
        self._by_stage: list[dict[Held, None]] = [{} for _ in Stage]
        self._alone: dict[Held, None] = {}

    def add(self, held: Held, since_s: float) -> None:
        """Hold an entry given to this worker by a command that was sent at `since_s` (monotonic)."""
        if held.ref in self._held:
            raise ValueError(f"{held.ref.entry_id} is held already")
        self._held[held.ref] = held
        held.by_stage = self._by_stage
        self._by_stage[held.stage][held] = None
        held.lease = self._leases.hold(held.ref, since_s)

    def drop(self, held: Held) -> None:
        """Hold it no longer."""
        if self.has(held):
            del self._held[held.ref]
            held.by_stage = None
            del self._by_stage[held.stage][held]
            self._alone.pop(held, None)
            self._leases.release(held.ref)

    def __contains__(self, ref: object) -> bool:
        """Whether an entry is held."""
        return ref in self._held

    def has(self, held: Held) -> bool:
        """Whether this very holding of an entry goes on, and no later one of the same entry."""
        return self._held.get(held.ref) is held

    def __len__(self) -> int:
        """Number of entries held."""
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        """All entries; they may be dropped on the way."""
        return iter(tuple(self._held.values()))

    def at(self, *stages: Stage) -> list[Held]:
        """The entries in these stages: of each in turn, in the order in which they came there."""
        return [held for stage in stages for held in self._by_stage[stage]]

    def num_at(self, *stages: Stage) -> int:
        """How many entries are in these stages."""
        num = 0
        for stage in stages:
            num += len(self._by_stage[stage])
        return num

    def set_alone(self, held: Held, alone: bool) -> None:
        """Say whether a held entry must be run apart from all others."""
        held.alone = alone
        if alone:
            self._alone[held] = None
        else:
            self._alone.pop(held, None)

    def alone(self) -> list[Held]:
        """The entries that must be run apart from all others."""
        return list(self._alone)
