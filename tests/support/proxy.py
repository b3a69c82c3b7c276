"""A TCP proxy between a client and a server of a test: it loses single replies, cuts, delays and holds connections.

Fixture `proxy_to`: `proxy_to(server)` starts one that ends with the test. A lost reply is one whose command the server
has carried out: the proxy hands the request on, waits for the answer, and cuts the client off instead of passing it on.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

_CHUNK = 1 << 16


@dataclass(eq=False)
class Loss:
    """A reply to lose: the first `skip` requests that hold all `needles` pass, the next `count` lose their reply."""

    needles: tuple[bytes, ...]
    count: int
    skip: int
    before: bool  # cut before the server sees the request
    happened: threading.Event = field(default_factory=threading.Event)
    num_lost: int = 0

    def applies(self, request: bytes) -> bool:
        """Whether this request's reply is to be lost; counts."""
        if self.num_lost >= self.count or not all(needle in request for needle in self.needles):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.num_lost += 1
        if self.num_lost >= self.count:
            self.happened.set()
        return True


class Proxy:
    """Listens on a free port of the loopback and passes every connection on to the server's port."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.delay_s = 0.0  # of every reply
        self.num_connections = 0
        self._open = threading.Event()  # cleared: nothing passes in either direction
        self._open.set()
        self._refusing = False
        self._losses: list[Loss] = []
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_reply(self, *needles: bytes, count: int = 1, skip: int = 0, before: bool = False) -> Loss:
        """Lose the reply to the next request whose bytes hold all `needles`; `before`: the server never sees it."""
        loss = Loss(needles, count, skip, before)
        with self._lock:
            self._losses.append(loss)
        return loss

    @property
    def num_lost(self) -> int:
        """Replies, or commands, that were lost so far."""
        with self._lock:
            return sum(each.num_lost for each in self._losses)

    def cut(self) -> int:
        """Close all connections that are open now; the number of them."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._close(pair)
        return len(pairs)

    def refuse(self) -> None:
        """Close all connections, and every new one at once, until `accept`."""
        self._refusing = True
        self.cut()

    def accept(self) -> None:
        """Let connections through again."""
        self._refusing = False

    def hold(self) -> None:
        """Let nothing pass, connections staying open, until `release`."""
        self._open.clear()

    def release(self) -> None:
        """Let everything pass again."""
        self._open.set()

    def close(self) -> None:
        """End."""
        self._open.set()
        # shutdown wakes the thread that waits in accept; close alone would not
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                client.close()
                continue
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = (client, server)
            with self._lock:
                self._pairs.add(pair)
                self.num_connections += 1
            losing = threading.Event()
            threading.Thread(target=self._requests, args=(pair, losing), daemon=True).start()
            threading.Thread(target=self._replies, args=(pair, losing), daemon=True).start()

    def _requests(self, pair: tuple[socket.socket, socket.socket], losing: threading.Event) -> None:
        client, server = pair
        tail = b""
        with contextlib.suppress(OSError):
            while chunk := client.recv(_CHUNK):
                self._open.wait()
                # A request may come in two pieces: what came before counts too, but no needle twice.
                seen, tail = tail + chunk, chunk[-256:]
                with self._lock:
                    loss = next((each for each in self._losses if each.applies(seen)), None)
                if loss is not None:
                    tail = b""
                    if loss.before:
                        break
                    losing.set()
                server.sendall(chunk)
        self._close(pair)

    def _replies(self, pair: tuple[socket.socket, socket.socket], losing: threading.Event) -> None:
        client, server = pair
        with contextlib.suppress(OSError):
            while chunk := server.recv(_CHUNK):
                self._open.wait()
                if self.delay_s:
                    time.sleep(self.delay_s)
                if losing.is_set():
                    time.sleep(0.01)  # a pipeline's later commands are carried out too
                    break
                client.sendall(chunk)
        self._close(pair)

    def _close(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._lock:
            self._pairs.discard(pair)
        for each in pair:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def proxy_to() -> Iterator[Callable[..., Proxy]]:
    """`proxy_to(server)` starts a proxy to a server (anything with a `port`) that ends with the test."""
    started: list[Proxy] = []

    def start(server: object) -> Proxy:
        started.append(Proxy(server.port))  # type: ignore[attr-defined]
        return started[-1]

    yield start
    for each in started:
        each.close()
