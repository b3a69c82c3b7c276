"""A Redis Cluster of three masters for tests: fixture `cluster` (one for each module), and moving of slots."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from tests.support.server import Server, free_port, installed_redis, start_server
from tests.support.worker_process import wait_until

if TYPE_CHECKING:
    from tests.support.tls import Certificates

NUM_SLOTS = 16384
_ARGUMENTS = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--save", "")


@dataclass
class Cluster:
    """Three masters with a third of the slots each."""

    nodes: list[Server]
    tls_ports: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Address of the first node."""
        return self.nodes[0].url

    @property
    def whole_url(self) -> str:
        """Address by all nodes."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def whole_tls_url(self) -> str:
        """The same with TLS."""
        return "rediss+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.tls_ports)

    def client(self) -> redis.RedisCluster:
        """A client that knows of all nodes."""
        return redis.RedisCluster.from_url(self.url)

    def owner_of(self, key: str) -> int:
        """Index of the node that has the key's slot."""
        slot = raw(self.nodes[0], "CLUSTER", "KEYSLOT", key)
        for first, last, master, *_ in raw(self.nodes[0], "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(index for index, node in enumerate(self.nodes) if node.port == master[1])
        raise AssertionError(f"nobody has slot {slot}")

    def move(self, key: str, target: int) -> None:
        """Move the slot of a key to another node, with all keys in it."""
        ids = [raw(node, "CLUSTER", "MYID") for node in self.nodes]
        source, slot = self.owner_of(key), raw(self.nodes[0], "CLUSTER", "KEYSLOT", key)
        old, new = self.nodes[source], self.nodes[target]
        raw(new, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        raw(old, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        while keys := raw(old, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            raw(old, "MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *keys)
        for node in sorted(
            self.nodes, key=lambda each: each is not new
        ):  # the new owner first, so that it bumps its epoch
            raw(node, "CLUSTER", "SETSLOT", slot, "NODE", ids[target])

    def add_replica(self, tmp_path: Path, of: int) -> Server:
        """Start a replica of a master, and wait until all nodes know it and it has all that the master has."""
        replica = start_server(tmp_path, *_ARGUMENTS, "--cluster-port", str(free_port()))
        [_, bus_port] = raw(self.nodes[0], "CONFIG", "GET", "cluster-port")
        raw(replica, "CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, int(bus_port))
        master_id = raw(self.nodes[of], "CLUSTER", "MYID")
        self.nodes.append(replica)
        wait_until(lambda: all(_num_known(node) == len(self.nodes) for node in self.nodes))
        raw(replica, "CLUSTER", "REPLICATE", master_id)
        wait_until(lambda: all(_num_replicas(node, self.nodes[of].port) == 1 for node in self.nodes))
        wait_until(lambda: b"master_link_status:up" in raw(replica, "INFO", "replication"))
        return replica


def _num_known(node: Server) -> int:
    return int(raw(node, "CLUSTER", "INFO").split(b"cluster_known_nodes:")[1].split()[0])


def _num_replicas(node: Server, master_port: int) -> int:
    return next(len(row) - 3 for row in raw(node, "CLUSTER", "SLOTS") if row[2][1] == master_port)


def raw(node: Server, *command: object) -> Any:
    """A node's reply as it comes."""
    connection = redis.Connection(port=node.port, protocol=2)
    connection.send_command(*command)
    try:
        return connection.read_response()
    finally:
        connection.disconnect()


def start_cluster(tmp_path: Path, certificates: Certificates | None = None) -> Cluster:
    """Three masters on the loopback, ready when this returns; with TLS too, where there are certificates."""
    tls_ports = [free_port() for _ in range(3)] if certificates else []
    nodes: list[Server] = []
    for number in range(3):
        args = [*_ARGUMENTS, "--cluster-port", str(free_port())]
        if certificates:
            args += [*certificates.server_args(tls_ports[number]), "--tls-cluster", "yes"]
        nodes.append(start_server(tmp_path, *args, binary=installed_redis() if certificates else None))
    [_, bus_port] = raw(nodes[0], "CONFIG", "GET", "cluster-port")
    for number, node in enumerate(nodes):
        first, last = number * NUM_SLOTS // 3, (number + 1) * NUM_SLOTS // 3 - 1
        raw(node, "CLUSTER", "ADDSLOTSRANGE", first, last)
        if number:
            raw(node, "CLUSTER", "MEET", "127.0.0.1", nodes[0].port, int(bus_port))
    end_s = time.monotonic() + 20
    while not all(_is_up(node) for node in nodes):
        if time.monotonic() > end_s:
            raise AssertionError("the cluster does not come up")
        time.sleep(0.05)
    return Cluster(nodes, tls_ports)


def _is_up(node: Server) -> bool:
    return b"cluster_state:ok" in raw(node, "CLUSTER", "INFO") and len(raw(node, "CLUSTER", "SLOTS")) == 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of three masters."""
    made = start_cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    for node in made.nodes:
        node.stop()
