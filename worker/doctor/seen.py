"""What the doctor has seen: one frozen value, read once, of which every check is a function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...clients.keys import Keys
from ..status import LineStatus, WorkerStatus


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """One server, or one master of a cluster."""

    address: str  # host:port, or the path of a socket
    error: str = ""  # why it could not be looked at; then nothing else is set
    info: Mapping[str, str] = field(default_factory=dict[str, str])  # what INFO says
    round_trips_s: tuple[float, ...] = ()  # of one small command after the other
    clock_ahead_s: float = 0.0  # its clock less this machine's
    clock_error_s: float = 0.0  # the above is known so well
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])  # rights, by role
    num_keys: int = 0

    def number(self, name: str) -> int:
        """A number of INFO; 0 where it says none."""
        text = self.info.get(name, "")
        return int(text) if text.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class Pending:
    """A job that is taken: whose it is, and for how long nobody has renewed it."""

    consumer: str
    idle_s: float


@dataclass(frozen=True, slots=True)
class LineSeen:
    """One of the three streams of jobs."""

    key: str
    status: LineStatus
    oldest_s: float | None  # age of the oldest job, taken or not, on the server's clock; None without one
    newest_ahead_s: float  # how far the newest id is in the future, on the server's clock; not above 0 if it is not
    pending: tuple[Pending, ...]  # the oldest of those that are taken, as many as were looked at


@dataclass(frozen=True, slots=True)
class QueueSeen:
    """The queue, all of which lies on one node."""

    lines: tuple[LineSeen, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()  # every consumer, also those without a sign of life
    num_dead: int = 0
    newest_dead_ahead_s: float = 0.0  # as newest_ahead_s
    foreign: tuple[tuple[str, str], ...] = ()  # keys that are no streams, and what they are

    @property
    def alive(self) -> tuple[WorkerStatus, ...]:
        """Workers that have given a sign of life within their lease."""
        return tuple(each for each in self.workers if each.fields)

    @property
    def num_waiting(self) -> int:
        """Jobs that no worker has taken."""
        return sum(line.status.waiting for line in self.lines)

    @property
    def num_taken(self) -> int:
        """Jobs that are with a worker, or were handed back by one."""
        return sum(line.status.taken for line in self.lines)

    @property
    def oldest_waiting_s(self) -> float:
        """How long the oldest job has waited to be taken; 0 if none waits."""
        return max((line.status.oldest_waiting_s or 0.0 for line in self.lines), default=0.0)


@dataclass(frozen=True, slots=True)
class KindSeen:
    """Keys of one kind among those looked at."""

    kind: str
    num_keys: int
    num_measured: int
    measured_bytes: int  # of those that were measured together
    num_lasting: int = 0  # without a time to live, though they should have one
    lasting: tuple[str, ...] = ()  # the first few of these

    @property
    def mean_bytes(self) -> float:
        """What a key of this kind takes on average."""
        return self.measured_bytes / self.num_measured if self.num_measured else 0.0


@dataclass(frozen=True, slots=True)
class KeysSeen:
    """A sample of the keys under the prefix, over all nodes."""

    num_all: int = 0  # keys of the servers, whoever's
    num_looked: int = 0  # of these
    is_complete: bool = True  # all were looked at
    kinds: tuple[KindSeen, ...] = ()
    queues: tuple[str, ...] = ()  # with a stream of jobs among what was looked at


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything."""

    keys: Keys
    lease_s: float  # as the workers say, or as the flag does
    queue_ttl_s: float
    user: str  # as whom the server was asked
    nodes: tuple[NodeSeen, ...]
    queue: QueueSeen | None  # None: it could not be read
    stored: KeysSeen
    refused: tuple[str, ...] = ()  # what could not be looked at, and why
    left_out: tuple[str, ...] = ()  # what was not looked at, to be done in time
