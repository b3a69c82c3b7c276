"""A Redis Cluster of real processes for tests: slots that move, masters that are killed and come back as replicas.

Fixture `cluster` (one for each module): three masters without replicas.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pytest
import redis
from redis import asyncio as aio

from tests.support.server import Server, free_port, start_server
from tests.support.server_kinds import installed_redis

if TYPE_CHECKING:
    from tests.support.tls import Certificates

NUM_SLOTS = 16384
NUM_MASTERS = 3
_ATTEMPT_S = 5.5  # a replica gives up an attempt to take over in order after 5 s


@dataclass
class Cluster:
    """Three masters with a third of the slots each, and perhaps a replica of each."""

    nodes: list[Server]
    ids: list[bytes] = field(default_factory=list[bytes])  # the nodes' names, in the same order
    tls_ports: list[int] = field(default_factory=list[int])
    num_moves: int = 0
    num_failovers: int = 0

    @property
    def url(self) -> str:
        """Address of the first node that runs."""
        return next(node.url for node in self.nodes if node.pid)

    @property
    def whole_url(self) -> str:
        """Address by all nodes."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def whole_tls_url(self) -> str:
        """The same with TLS."""
        return "rediss+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.tls_ports)

    def target(self, *, is_async: bool) -> str | aio.RedisCluster:
        """What a client of the library is made with: an address of some nodes, or redis-py's own client."""
        return self.raw_client(is_async=True) if is_async else self.whole_url

    def raw_client(self, *, is_async: bool) -> Any:
        """A client that knows all nodes."""
        return (aio.RedisCluster if is_async else redis.RedisCluster).from_url(self.url)

    def errors(self) -> Counter[str]:
        """How often the nodes have answered with each error, since they were started."""
        counts: Counter[str] = Counter()
        for node in self._running():
            for line in raw(node, "INFO", "errorstats").decode().splitlines():
                if match := re.match(r"errorstat_(\w+):count=(\d+)", line):
                    counts[match[1]] += int(match[2])
        return counts

    def client(self) -> redis.RedisCluster:
        """A client that knows of all nodes."""
        return redis.RedisCluster.from_url(self.url)

    # --- who is who ---------------------------------------------------------------------------------------------------

    def owner_of(self, key: str) -> int:
        """Index of the node that has the key's slot, as a node that runs has it."""
        slot, asked = slot_of(key), self._running()[0]
        for first, last, master, *_ in raw(asked, "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return self.ids.index(master[2])
        raise AssertionError(f"nobody has slot {slot}")

    def masters(self) -> set[int]:
        """Indices of the nodes that have slots."""
        return {self.ids.index(master[2]) for _, _, master, *_ in raw(self._running()[0], "CLUSTER", "SLOTS")}

    def replica_of(self, master: int) -> int:
        """Index of a replica of a master, as that master has it: it may replicate before its master has heard of it."""
        _wait(lambda: bool(self._replicas_of(master)), 10.0, f"has a replica of node {master}")
        return self._replicas_of(master)[0]

    def _replicas_of(self, master: int) -> list[int]:
        nodes = [line.split() for line in raw(self.nodes[master], "CLUSTER", "NODES").decode().splitlines()]
        return [
            self.ids.index(name.encode())
            for name, _, flags, of, *_ in nodes
            if "slave" in flags and "fail" not in flags and of.encode() == self.ids[master]
        ]

    def _running(self) -> list[Server]:
        return [node for node in self.nodes if node.pid]

    def holding(self, master: int) -> Callable[[str], bool]:
        """Whether a key is one of those that a master has at this moment."""
        slots = raw(self.nodes[master], "CLUSTER", "SLOTS")
        own = [(first, last) for first, last, node, *_ in slots if node[2] == self.ids[master]]
        return lambda key: any(first <= slot_of(key) <= last for first, last in own)

    def set_node_timeout(self, timeout_ms: int) -> None:
        """How soon a node that is silent is given up."""
        for node in self.nodes:
            raw(node, "CONFIG", "SET", "cluster-node-timeout", timeout_ms)

    # --- slots --------------------------------------------------------------------------------------------------------

    def move(self, key: str, target: int, between: Callable[[], None] = lambda: None) -> None:
        """Move the slot of a key to another node, with all keys in it, one by one.

        `between` is called with the slot half moved: before the first key, and after each.
        """
        source, slot = self.owner_of(key), slot_of(key)
        old, new = self.nodes[source], self.nodes[target]
        raw(new, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source])
        raw(old, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[target])
        between()
        while keys := raw(old, "CLUSTER", "GETKEYSINSLOT", slot, 1):
            raw(old, "MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *keys)
            between()
        # The new owner first, so that it bumps its epoch; replicas learn it from their masters.
        masters = [node for node in self._running() if b"role:master" in raw(node, "INFO", "replication")]
        for node in sorted(masters, key=lambda each: each is not new):
            raw(node, "CLUSTER", "SETSLOT", slot, "NODE", self.ids[target])
        self.num_moves += 1

    # --- failovers ----------------------------------------------------------------------------------------------------

    def fail_over(self, master: int) -> int:
        """Have a replica take over in order (CLUSTER FAILOVER): nothing is lost. Index of the new master.

        The others vote about the same master once in two node timeouts only. A replica that they deny it waits for five
        seconds and gives up without a word, and is to be asked again.
        """
        replica, asked_s = self.replica_of(master), -math.inf

        def is_promoted() -> bool:
            nonlocal asked_s
            if self._is_master(replica):
                return True
            if time.monotonic() - asked_s > _ATTEMPT_S:
                raw(self.nodes[replica], "CLUSTER", "FAILOVER")
                asked_s = time.monotonic()
            return False

        _wait(is_promoted, 40.0, "is promoted")
        self.num_failovers += 1
        return replica

    def _is_master(self, node: int) -> bool:
        return b"role:master" in raw(self.nodes[node], "INFO", "replication")

    def heal(self, timeout_s: float = 30.0) -> None:
        """Start what does not run, and wait until all is whole: every slot served, every replica at work."""
        for node in self.nodes:
            if not node.pid:
                node.restart()
        _wait(self._is_whole, timeout_s, "is whole")

    def _is_whole(self) -> bool:
        views = [_view(node) for node in self.nodes]
        num_replicas = len(self.nodes) - NUM_MASTERS
        return all(is_up and view == views[0][1] for is_up, view in views) and self._num_in_step() == num_replicas

    def _num_in_step(self) -> int:
        """Replicas that have all that their masters had a moment ago."""
        said = {node.port: _replication(node) for node in self.nodes}
        masters = {port: int(each["master_repl_offset"]) for port, each in said.items() if each["role"] == "master"}
        replicas = [_replication(node) for node in self.nodes if said[node.port]["role"] == "slave"]
        return sum(
            each["master_link_status"] == "up"
            and int(each["slave_repl_offset"]) >= masters.get(int(each["master_port"]), 1 << 62)
            for each in replicas
        )

    def stop(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.stop()


def _view(node: Server) -> tuple[bool, list[Any]]:
    """Whether a node finds its cluster whole, and whom it takes for the owners of the slots."""
    owners = sorted((first, last, master[2]) for first, last, master, *_ in raw(node, "CLUSTER", "SLOTS"))
    return b"cluster_state:ok" in raw(node, "CLUSTER", "INFO"), owners


def _replication(node: Server) -> dict[str, str]:
    """What a node says of itself as a master or replica."""
    lines = raw(node, "INFO", "replication").decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def slot_of(key: str) -> int:
    """Which slot a key lies in."""
    return int(redis.crc.key_slot(key.encode()))


_connections: WeakKeyDictionary[Server, redis.Connection] = WeakKeyDictionary()


def raw(node: Server, *command: object) -> Any:
    """A node's reply as it comes."""
    if node not in _connections:
        _connections[node] = redis.Connection(port=node.port, protocol=2)
    connection = _connections[node]
    try:
        connection.send_command(*command)
        return connection.read_response(disconnect_on_error=True)
    except (redis.ConnectionError, OSError):
        connection.disconnect()
        raise


def _wait(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except (redis.RedisError, OSError):
            pass  # a node is starting
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {timeout_s} s: the cluster {what}")
        time.sleep(0.02)


def start_cluster(
    tmp_path: Path,
    *,
    binary: Path | None = None,
    replicas: bool = False,
    node_timeout_ms: int = 2000,
    certificates: Certificates | None = None,
    appendonly: bool = False,
) -> Cluster:
    """Three masters on the loopback, each with a replica if `replicas`; whole when this returns.

    With `certificates` they speak TLS too, for which a binary is taken that can. With `appendonly` nothing that they
    have acknowledged is lost when they are killed.
    """
    arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(node_timeout_ms), "--save", ""]
    arguments += ["--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"]
    arguments += ["--appendfsync", "always"] if appendonly else []
    tls_ports = [free_port() for _ in range(NUM_MASTERS)] if certificates else []
    nodes: list[Server] = []
    for number in range(2 * NUM_MASTERS if replicas else NUM_MASTERS):
        more = ["--cluster-port", str(free_port())]
        if certificates:
            more += [*certificates.server_args(tls_ports[number]), "--tls-cluster", "yes"]
        kind = installed_redis() if certificates else binary
        nodes.append(start_server(tmp_path, *arguments, *more, binary=kind, appendonly=appendonly))
    made = Cluster(nodes, [raw(node, "CLUSTER", "MYID") for node in nodes], tls_ports)
    [_, bus_port] = raw(nodes[0], "CONFIG", "GET", "cluster-port")
    for number, node in enumerate(nodes):
        if number < NUM_MASTERS:
            first, last = number * NUM_SLOTS // NUM_MASTERS, (number + 1) * NUM_SLOTS // NUM_MASTERS - 1
            raw(node, "CLUSTER", "ADDSLOTSRANGE", first, last)
        raw(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        if number:
            raw(node, "CLUSTER", "MEET", "127.0.0.1", nodes[0].port, int(bus_port))
    for number, node in enumerate(nodes[NUM_MASTERS:]):
        master = made.ids[number]
        _wait(lambda at=node, name=master: name in raw(at, "CLUSTER", "NODES"), 20, "has met")
        _wait(lambda at=node, name=master: raw(at, "CLUSTER", "REPLICATE", name) == b"OK", 20, "has its replicas")
    made.heal()
    return made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of three masters."""
    made = start_cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.stop()
