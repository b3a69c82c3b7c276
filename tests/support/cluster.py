"""A Redis Cluster of three masters for tests: fixture `cluster` (one for each module), and moving of slots."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.server import Server, start_server

NUM_SLOTS = 16384


@dataclass
class Cluster:
    """Three masters with a third of the slots each."""

    nodes: list[Server]

    @property
    def url(self) -> str:
        """Address of the first node."""
        return self.nodes[0].url

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


def raw(node: Server, *command: object) -> Any:
    """A node's reply as it comes."""
    connection = redis.Connection(port=node.port, protocol=2)
    connection.send_command(*command)
    try:
        return connection.read_response()
    finally:
        connection.disconnect()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start_cluster(tmp_path: Path) -> Cluster:
    """Three masters on the loopback, ready when this returns."""
    arguments = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--save", "")
    nodes = [start_server(tmp_path, *arguments, "--cluster-port", str(_free_port())) for _ in range(3)]
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
    return Cluster(nodes)


def _is_up(node: Server) -> bool:
    return b"cluster_state:ok" in raw(node, "CLUSTER", "INFO") and len(raw(node, "CLUSTER", "SLOTS")) == 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of three masters."""
    made = start_cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    for node in made.nodes:
        node.stop()
