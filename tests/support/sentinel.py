"""A master, a replica and three sentinels for tests: fixture `own_sentinels`, a function that starts such a group."""

from __future__ import annotations

import itertools
import secrets
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.asyncio import sentinel as aio_sentinel

from headrace.worker.child import end_child, start_child
from headrace.worker.embedded import find_binary
from tests.support.server import Server, free_port, start_server
from tests.support.worker_process import wait_until

if TYPE_CHECKING:
    from tests.support.tls import Certificates

SERVICE = "main"
_HOST = "127.0.0.1"
_RAW_TIMEOUT_S = 2.0
_numbers = itertools.count(1)


class SentinelProcess:
    """One sentinel: `port`, `stop`, `start` again with what it has learnt."""

    def __init__(self, folder: Path, port: int, lines: list[str], binary: Path | None, known_port: int) -> None:
        folder.mkdir(parents=True)
        self.port = port
        self.known_port = known_port  # by which others know it: the one with TLS, if there is one
        self._file = folder / "sentinel.conf"
        self._file.write_text(
            "\n".join([f"port {port}", f"bind {_HOST}", f"dir {folder}", "protected-mode no", *lines])
        )
        self._log = folder / "sentinel.log"
        self._binary = find_binary(binary)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it; it answers when this returns."""
        with self._log.open("ab") as log:
            self._process = start_child([str(self._binary), str(self._file), "--sentinel"], log)
        wait_until(self._answers, 10, "the sentinel answers")

    def _answers(self) -> bool:
        try:
            with socket.create_connection((_HOST, self.port), timeout=2.0):
                return True
        except OSError:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-1000:]
            return False

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            end_child(self._process, 2.0)
            self._process = None

    def ask(self, *command: object, password: str | None = None) -> Any:
        """A reply as it comes."""
        connection = redis.Connection(host=_HOST, port=self.port, protocol=2, password=password)
        connection.send_command(*command)
        try:
            return connection.read_response()
        finally:
            connection.disconnect()


class SentinelGroup:
    """Servers, the first of which is the master at the beginning, and the sentinels that watch over them."""

    def __init__(self, servers: list[Server], ports: list[int], sentinels: list[SentinelProcess]) -> None:
        self.servers = servers
        self._ports = ports  # by which the sentinels know the servers
        self.sentinels = sentinels

    @property
    def url(self) -> str:
        """The address of the master, whichever it is; with TLS the scheme is to be `rediss`."""
        hosts = ",".join(f"{_HOST}:{each.known_port}" for each in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    @property
    def master(self) -> Server:
        """The server that the first living sentinel names."""
        return self._server(self.master_port())

    def _server(self, port: int) -> Server:
        return self.servers[self._ports.index(port)]

    def master_port(self) -> int:
        """The port by which it names it."""
        sentinel = next(each for each in self.sentinels if each._process is not None)
        return int(sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def client(self, **options: object) -> redis.Redis:
        """A plain client of the present master."""
        return self.master.client(**options)

    def target(self, *, is_async: bool) -> str:
        """What a client of the library is made with."""
        del is_async
        return self.url

    def raw_client(self, *, is_async: bool) -> Any:
        """A client of whichever server is the master, by redis-py's own means."""
        nodes = [(_HOST, each.port) for each in self.sentinels]
        kind = aio_sentinel.Sentinel if is_async else redis.Sentinel
        return kind(nodes, socket_timeout=_RAW_TIMEOUT_S).master_for(SERVICE, socket_timeout=_RAW_TIMEOUT_S)

    def wait_synced(self) -> None:
        """Wait until the sentinels know each other and all replicas, and these have all that the master has."""
        wait_until(self._is_ready, 20, "the group is ready")
        with self.client() as master:
            master.set("headrace-test-mark", "1", px=60_000)
            assert master.execute_command("WAIT", len(self.servers) - 1, 5000) == len(self.servers) - 1

    def _is_ready(self) -> bool:
        for sentinel in self.sentinels:
            reply = sentinel.ask("SENTINEL", "MASTER", SERVICE)
            state = dict(zip(reply[::2], reply[1::2], strict=True))
            known = (int(state[b"num-slaves"]), int(state[b"num-other-sentinels"]))
            if known != (len(self.servers) - 1, len(self.sentinels) - 1) or state[b"flags"] != b"master":
                return False
            if any(b"down" in _field(each, b"flags") for each in sentinel.ask("SENTINEL", "REPLICAS", SERVICE)):
                return False
        if len({sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1] for sentinel in self.sentinels}) > 1:
            return False
        with self.client() as master:
            replicas = [value for key, value in master.info("replication").items() if key.startswith("slave")]
        return len(replicas) == len(self.servers) - 1 and all(each["state"] == "online" for each in replicas)

    def fail_over(self) -> None:
        """Have the replica promoted while the master lives; it is the master when this returns."""
        old = self.master_port()
        self.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
        self.wait_for_another(old)

    def wait_for_another(self, old_port: int, timeout_s: float = 30.0) -> None:
        """Wait until every living sentinel names another master, which takes writes."""

        def is_done() -> bool:
            living = [each for each in self.sentinels if each._process is not None]
            ports = {int(each.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1]) for each in living}
            return old_port not in ports and len(ports) == 1 and self._is_master(next(iter(ports)))

        wait_until(is_done, timeout_s, "another server is the master")

    def heal(self) -> None:
        """Start what does not run, as a replica of the master, and wait until all are in step."""
        master = self.master_port()
        for server in self.servers:
            if not server.pid:
                server.restart()
            if server.port != master:
                with server.client() as client:
                    client.execute_command("REPLICAOF", _HOST, master)
        self.wait_synced()

    def _is_master(self, port: int) -> bool:
        with self._server(port).client() as client:
            return client.execute_command("ROLE")[0] == b"master"

    def stop(self) -> None:
        """End everything."""
        for each in (*self.sentinels, *self.servers):
            each.stop()


def _field(reply: list[bytes], name: bytes) -> bytes:
    return dict(zip(reply[::2], reply[1::2], strict=True))[name]


def start_sentinels(
    tmp_path: Path,
    *,
    num_replicas: int = 1,
    num_sentinels: int = 3,
    binary: Path | None = None,
    server_args: tuple[str, ...] = (),
    sentinel_lines: tuple[str, ...] = (),
    appendonly: bool = False,
    certificates: Certificates | None = None,
) -> SentinelGroup:
    """A group whose sentinels know each other from the start: they would otherwise take seconds to meet.

    A master that is silent for half a second counts as down.
    """
    servers: list[Server] = []
    ports: list[int] = []
    for number in range(1 + num_replicas):
        args = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1", *server_args]
        if certificates is not None:
            args += [*certificates.server_args(free_port()), "--tls-replication", "yes"]
        if number:
            args += ["--replicaof", f"{_HOST} {ports[0]}"]
        servers.append(start_server(tmp_path, *args, binary=binary, appendonly=appendonly))
        ports.append(int(args[args.index("--tls-port") + 1]) if certificates else servers[-1].port)
    own_ports = [free_port() for _ in range(num_sentinels)]
    known = {port: (free_port() if certificates else port, secrets.token_hex(20)) for port in own_ports}
    sentinels: list[SentinelProcess] = []
    for port, (known_port, own_id) in known.items():
        lines = [
            f"sentinel myid {own_id}",
            f"sentinel monitor {SERVICE} {_HOST} {ports[0]} {num_sentinels // 2 + 1}",
            f"sentinel down-after-milliseconds {SERVICE} 500",
            f"sentinel failover-timeout {SERVICE} 1500",
            *(f"sentinel known-replica {SERVICE} {_HOST} {each}" for each in ports[1:]),
            *(f"sentinel known-sentinel {SERVICE} {_HOST} {a} {b}" for a, b in known.values() if a != known_port),
            *(certificates.sentinel_lines(known_port) if certificates else ()),
            *sentinel_lines,
        ]
        folder = tmp_path / f"sentinel-{next(_numbers)}"
        sentinels.append(SentinelProcess(folder, port, lines, binary, known_port))
    return SentinelGroup(servers, ports, sentinels)


@pytest.fixture
def own_sentinels(tmp_path: Path) -> Iterator[Callable[..., SentinelGroup]]:
    """`own_sentinels(**options of start_sentinels)` starts a group that ends with the test."""
    started: list[SentinelGroup] = []

    def start(**options: Any) -> SentinelGroup:
        started.append(start_sentinels(tmp_path, **options))
        return started[-1]

    yield start
    for each in started:
        each.stop()
