"""The same connection for a Redis Cluster: each command goes to the node that has its key's slot.

All keys of a queue lie in one slot and all of a request in another, so every script stays on one node. A node that is
not connected is not connected in passing: its commands come out as LOST, and the next `ensure` connects it, so that a
new connection is always seen before anything is sent over it. Slots that move (MOVED, ASK) come out as failures to be
sent again, and the map of slots is read anew. The queue's node is home: without it nothing can be done, without another
one all but its requests go on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, cast

from redis.crc import key_slot

from ..clients.address import Address, Node
from .connection import Failed, Link
from .errors import LinkError
from .frame import hash_tag
from .lua import Arg, Command

_NUM_SLOTS: Final = 16384
_MAP_PAUSE_S: Final = 0.02
# Where the key stands in commands that do not have it first; those without a key go to any node.
_KEY_AT: Final[dict[bytes, int]] = {b"EVALSHA": 3, b"XGROUP": 2, b"XINFO": 2}
_WITHOUT_KEY: Final = frozenset({b"TIME", b"INFO", b"SCRIPT"})
_NOT_CONNECTED: Final = Failed("LOST", "the node is not connected")

AnyLink: TypeAlias = "Link | ClusterLink"
_Range: TypeAlias = tuple[int, int, list[Node]]  # first and last slot, their master and its replicas


class ClusterLink:
    """A `Link` to every master, or to the home key's alone, found by any of the nodes that the address names.

    The home key's node also answers commands without a key.
    """

    def __init__(
        self, address: Address, socket_timeout_s: float, name: str, home_key: str, *, only_home: bool = False
    ) -> None:
        self._address = address
        self._home_key = home_key
        self._only_home = only_home
        self._socket_timeout_s = socket_timeout_s
        self._name = name
        self._home_slot = slot_of(home_key)
        seeds = [address.at(node) for node in address.nodes] or [address]  # or a node's socket
        self._seeds = [Link(each, socket_timeout_s, name) for each in seeds]
        self._others: dict[Node, Link] = {}  # nodes that are only asked for the map when nobody else answers
        self._map: list[_Range] = []
        self._refusal = ""  # what a node said instead of telling of its cluster
        self._links: dict[Node, Link] = {}
        self._gone = 0  # connections of links that are no masters any more
        self._owners: list[Node | None] = [None] * _NUM_SLOTS
        self._stale = True  # the map of slots is to be read
        self._next_map_s = 0.0  # not before
        self._sent: list[Link | None] = []  # of the commands under way, which went to which node
        self._single: Link | None = None  # of `send` and `read`

    @property
    def is_connected(self) -> bool:
        """Whether the home key's node is connected (as far as this side knows)."""
        home = self._owners[self._home_slot]
        return home is not None and home in self._links and self._links[home].is_connected

    @property
    def is_whole(self) -> bool:
        """Whether every node that is wanted is connected, and the map of slots is known."""
        return not self._stale and all(link.is_connected for link in self._links.values())

    @property
    def generation(self) -> int:
        """Counts the connections made so far, to all nodes together."""
        return self._gone + sum(link.generation for link in self._links.values())

    @property
    def last_error(self) -> str:
        """What the last failure was."""
        return next((link.last_error for link in self._known() if link.last_error), "")

    def _known(self) -> list[Link]:
        return [*self._links.values(), *self._others.values(), *self._seeds]

    def for_home(self, name: str) -> ClusterLink:
        """A link of its own to the home key's node, which knows of all nodes that this one knows of."""
        made = ClusterLink(self._address, self._socket_timeout_s, name, self._home_key, only_home=True)
        made._take_map(self._map)
        return made

    def ensure(self) -> bool:
        """Connect to the masters, at most as often as the growing pauses allow. False: home is not connected."""
        if not self._ensure_all():
            self._stale = True  # after a failover another node has its slots
        if self._stale and (now_s := time.monotonic()) >= self._next_map_s:
            self._next_map_s = now_s + _MAP_PAUSE_S
            if self._read_map():
                self._ensure_all()
        return self.is_connected

    def _ensure_all(self) -> bool:
        connected = [link.ensure() for link in self._links.values()]  # all are tried
        return all(connected)

    def connect(self) -> None:
        """Connect to all that are wanted. Raises LinkError."""
        if not self._read_map():
            raise LinkError(self._refusal or self.last_error or "no node tells of its cluster")
        for link in self._links.values():
            link.connect()

    def _read_map(self) -> bool:
        for link in self._known():
            if link.ensure():
                [reply] = link.exchange([(b"CLUSTER", b"SLOTS")])
                if isinstance(reply, Failed):
                    self._refusal = f"{reply.code} {reply.message}"
                elif reply:
                    self._take_map(_ranges(reply, link.node[0]))
                    for each in (*self._others.values(), *self._seeds):
                        each.close()
                    return True
        return False

    def _take_map(self, ranges: list[_Range]) -> None:
        owners: list[Node | None] = [None] * _NUM_SLOTS
        for first, last, nodes in ranges:
            owners[first : last + 1] = nodes[:1] * (last + 1 - first)
        wanted = owners[self._home_slot : self._home_slot + 1] if self._only_home else owners
        masters = {owner for owner in wanted if owner is not None}
        for node in set(self._links) - masters:
            link = self._links.pop(node)
            self._gone += link.generation
            link.close()
        for node in masters - set(self._links):
            self._links[node] = self._link_to(node)
        others = {node for _, _, nodes in ranges for node in nodes} - masters
        self._others = {node: self._others.get(node) or self._link_to(node) for node in sorted(others)}
        self._map, self._owners = ranges, owners
        self._stale = None in owners

    def _link_to(self, node: Node) -> Link:
        return Link(self._address.at(node), self._socket_timeout_s, self._name)

    def _slot_of(self, command: Command) -> int:
        if isinstance(command, bytes):
            return slot_of(hash_tag(command))
        name = cast("bytes", command[0])
        if name in _WITHOUT_KEY:
            return self._home_slot
        return slot_of(command[command.index(b"STREAMS") + 1 if name == b"XREADGROUP" else _KEY_AT.get(name, 1)])

    def _link_of(self, command: Command) -> Link | None:
        owner = self._owners[self._slot_of(command)]
        link = None if owner is None else self._links.get(owner)
        return link if link is not None and link.is_connected else None

    # --- as Link ------------------------------------------------------------------------------------------------------

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send all commands, to each node its own, and read all replies; one outcome each."""
        if not commands:
            return []
        self.start(commands)
        return self.finish(len(commands))

    def start(self, commands: Sequence[Command]) -> None:
        """The first half of `exchange`."""
        self._sent = [self._link_of(command) for command in commands]
        for link in dict.fromkeys(link for link in self._sent if link is not None):
            link.start([command for command, to in zip(commands, self._sent, strict=True) if to is link])

    def finish(self, num_commands: int) -> list[Any]:
        """The second half of `exchange`."""
        replies = {
            link: iter(link.finish(self._sent.count(link)))
            for link in dict.fromkeys(link for link in self._sent if link is not None)
        }
        outcomes: list[Any] = [_NOT_CONNECTED if link is None else next(replies[link]) for link in self._sent]
        self._look_out(outcomes)
        return outcomes[:num_commands]

    def _look_out(self, outcomes: Sequence[Any]) -> None:
        codes = {outcome.code for outcome in outcomes if isinstance(outcome, Failed)}
        if codes & {"MOVED", "ASK", "CLUSTERDOWN", "LOST"}:
            self._stale = True

    def heed(self, outcomes: Sequence[Any]) -> None:
        """Do what errors in replies that `read` gave call for."""
        self._look_out(outcomes)
        if self._single is not None:
            self._single.heed(outcomes)

    def send(self, command: Command) -> None:
        """Send one command without waiting for its reply. Raises LinkError."""
        self._single = self._link_of(command)
        if self._single is None:
            raise LinkError(_NOT_CONNECTED.message)
        self._single.send(command)

    def read(self) -> Any:
        """Read the reply to `send`. Raises LinkError."""
        if self._single is None:
            raise LinkError(_NOT_CONNECTED.message)
        return self._single.read()

    def fileno(self) -> int:
        """The socket of the node that `send` went to. Raises LinkError without a connection."""
        if self._single is None:
            raise LinkError(_NOT_CONNECTED.message)
        return self._single.fileno()

    def nodes(self) -> list[Link]:
        """The connections to the masters."""
        return list(self._links.values())

    def close(self) -> None:
        """Close all sockets. The next `ensure` makes new connections."""
        for link in self._known():
            with contextlib.suppress(LinkError):
                link.close()


def _ranges(reply: list[Any], asked: str) -> list[_Range]:
    """What CLUSTER SLOTS says. A node may know its port only: then it is on the host that was asked."""
    return [
        (first, last, [(node[0].decode() if node[0] else asked, int(node[1])) for node in nodes])
        for first, last, *nodes in reply
    ]


def slot_of(key: Arg) -> int:
    """Which of the 16,384 slots a key lies in."""
    return int(key_slot(key if isinstance(key, bytes) else str(key).encode()))
