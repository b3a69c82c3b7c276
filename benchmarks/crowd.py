"""Many readers in one thread, each with a connection of its own that waits for one request's stream."""

from __future__ import annotations

import resource
import selectors
import socket
from collections.abc import Sequence
from typing import Any

import hiredis

from headrace.clients import Finished, Tokens
from headrace.clients.keys import Keys
from headrace.clients.reader import Reader
from headrace.worker.embedded import HOST

from .processes import RunError

SPARE_FILES = 300  # besides the readers' sockets
_READ_BYTES = 1 << 16
_HIREDIS: Any = hiredis  # its stub takes one word for a command


def allow_files(count: int) -> None:
    """Let this process, and those it starts, open so many files. Raises RunError if the system does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        if hard != resource.RLIM_INFINITY and hard < count:
            raise RunError(f"{count} open files are needed, and at most {hard} are allowed here (ulimit -Hn)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


class One:
    """One reader with its connection; `number` is its place among all."""

    def __init__(self, port: int, keys: Keys, request_id: str, number: int) -> None:
        self.number = number
        self.reader = Reader(request_id)
        self.num_tokens = 0
        self.socket = socket.create_connection((HOST, port))
        self._replies: Any = hiredis.Reader()
        self._stream = keys.out(request_id)
        self._ask()

    def _ask(self) -> None:
        """Wait for what comes next, without end."""
        words = ("XREAD", "BLOCK", "0", "STREAMS", self._stream, self.reader.read_from)
        command: bytes = _HIREDIS.pack_command(words)
        self.socket.sendall(command)

    def take(self) -> None:
        """Take what the socket has. Raises a StreamError for what does not follow, RunError if the server closes."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise RunError("the server closed a reader's connection")
        self._replies.feed(data)
        while (reply := self._replies.gets()) is not False:
            if isinstance(reply, Exception):
                raise RunError(f"the server refused a reader: {reply}")
            for entry_id, flat in reply[0][1]:
                event = self.reader.feed(entry_id, dict(zip(flat[::2], flat[1::2], strict=True)))
                if isinstance(event, Tokens | Finished):
                    self.num_tokens += len(event.token_ids)
            if not self.reader.done:
                self._ask()


class Crowd:
    """The readers of some requests, all waiting from the beginning; a context manager that closes their connections.

    What else is registered at `selector` (with None for its data) is read and thrown away.
    """

    def __init__(self, port: int, keys: Keys, request_ids: Sequence[str]) -> None:
        self.selector = selectors.DefaultSelector()
        self.open = len(request_ids)  # that have not ended
        self._ones: list[One] = []
        for number, request_id in enumerate(request_ids):
            one = One(port, keys, request_id, number)
            self._ones.append(one)
            self.selector.register(one.socket, selectors.EVENT_READ, one)

    def take(self, timeout_s: float | None = None) -> list[One]:
        """Wait for entries, for ever if `timeout_s` is None; give the readers that got some. Raises as `One.take`."""
        ready: list[One] = []
        for key, _ in self.selector.select(timeout_s):
            one: One | None = key.data
            if one is None:
                any_socket: Any = key.fileobj
                any_socket.recv(_READ_BYTES)
                continue
            one.take()
            ready.append(one)
            if one.reader.done:
                self.selector.unregister(one.socket)
                self.open -= 1
        return ready

    def check(self, wanted: Sequence[int]) -> None:
        """Raises RunError if a reader did not get the number of tokens that was asked for."""
        pairs = zip(self._ones, wanted, strict=True)
        wrong = [one.reader.request_id for one, num_out in pairs if one.num_tokens != num_out]
        if wrong:
            raise RunError(f"{len(wrong)} requests gave another number of tokens than was asked: {wrong[:3]}")

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._ones:
            one.socket.close()
        self.selector.close()
