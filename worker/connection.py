"""A connection whose every retry is ours: pipelines in, one outcome per command out, and it tells when it is a new one.

redis-py's clients reconnect and send again by themselves. For the writing side that would be a duplicate nobody knows
of, so redis-py only connects here (address, TLS, password, database), and hiredis packs and parses on the socket that
comes out of it: one system call for a pipeline, and a fifth of the time per command. When to connect, and what to send
again, is decided here and by the callers. The protocol's version is RESP 2, as the shape of replies depends on it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Any, Final, cast

import hiredis
from redis import exceptions as redis_errors

from ..clients.address import Address, Node
from ..clients.connect import make_pool
from ..clients.tls import tls_hint, tls_trouble
from . import lua
from .errors import LinkError
from .lua import Args, Command

_RANDOM = SystemRandom()
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_READ_BYTES = 1 << 16
_NOT_ENOUGH: Final = object()
# The command is not known to have done anything, and the reason passes: the same bytes again are right.
AGAIN: Final = frozenset(
    {"LOST", "LOADING", "OOM", "READONLY", "MISCONF", "TRYAGAIN", "NOSCRIPT"}
    | {"CLUSTERDOWN", "MASTERDOWN", "MOVED", "ASK", "NOREPLICAS", "BUSY", "UNBLOCKED"}
)
_LOCAL: Final = frozenset({"LOST", "MOVED", "ASK", "TRYAGAIN"})
FORBIDDEN: Final = "NOPERM"
# How servers say it of a command in a script: Redis 7.0; later ones and Valkey.
_FORBIDDEN_IN_SCRIPT: Final = ("The user executing the script can't", "ACL failure in script")
# The node is not, or not yet, the one that takes writes.
_LEAVE_ON: Final = frozenset({"READONLY", "LOADING", "MASTERDOWN", "UNBLOCKED"})
_hiredis: Any = hiredis  # its types say that a command has one argument
_pack: Callable[[Args], bytes] = _hiredis.pack_command


@dataclass(frozen=True, slots=True)
class Failed:
    """The outcome of a command without a result."""

    code: str  # the first word of the server's error; LOST where no reply came
    message: str

    @property
    def is_local(self) -> bool:
        """Whether the reason concerns one slot or one node of a Cluster: elsewhere all goes on."""
        return self.code in _LOCAL or (self.code == "CLUSTERDOWN" and self.message.startswith("Hash slot"))

    @property
    def again(self) -> bool:
        """Whether to send the same bytes again: it is not known that anything was done, and the reason passes."""
        return self.code in AGAIN


def as_failed(error: str) -> Failed:
    """An error of the server in its parts."""
    code, _, message = error.partition(" ")
    return Failed(FORBIDDEN if message.startswith(_FORBIDDEN_IN_SCRIPT) else code, message)


class _ReplyError(Exception):
    """An error as hiredis hands it out; never raised."""


# What an address may say of a client or a pool, or against what is decided here.
_NOT_OURS: Final = (
    "retry_on_timeout",
    "retry_on_error",
    "decode_responses",
    "health_check_interval",
    "max_connections",
)


def _options(address: Address, socket_timeout_s: float, name: str) -> dict[str, Any]:
    return {
        **{option: value for option, value in address.options.items() if option not in _NOT_OURS},
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": socket_timeout_s,
        "protocol": 2,
        "client_name": name,
    }


class Link:
    """One connection to one server, or to the master that sentinels name. Not thread-safe: each thread has its own.

    `generation` counts the connections made so far: whoever sees it change knows that replies may have been lost and
    that the server may be another one.
    """

    def __init__(self, address: Address, socket_timeout_s: float, name: str) -> None:
        self._pool = make_pool(address, _options(address, socket_timeout_s, name))  # a connection only borrows it
        self._connection = cast("Any", self._pool.make_connection())
        # A master without replicas may be one that sentinels have given up.
        self._leave_on = _LEAVE_ON | {"NOREPLICAS"} if address.kind == "sentinel" else _LEAVE_ON
        self._is_elsewhere = False  # somebody has seen that the name leads to another node now
        self._socket: socket.socket | None = None
        self._reader = _new_reader()
        self._scripts_loaded = False
        self._pause_s = 0.0
        self._next_try_s = 0.0
        self.generation = 0
        self.last_error = ""

    @property
    def is_connected(self) -> bool:
        """Whether a socket is open (as far as this side knows)."""
        return self._socket is not None

    @property
    def is_whole(self) -> bool:
        """Whether every node is connected: there is one."""
        return self.is_connected

    @property
    def node(self) -> Node:
        """Host and port of the server; empty for a socket."""
        return str(getattr(self._connection, "host", "")), int(getattr(self._connection, "port", 0) or 0)

    def leave(self) -> None:
        """Have the next `ensure` make a new connection. Any thread may call it."""
        self._is_elsewhere = True

    def ensure(self) -> bool:
        """Connect if need be, at most as often as the growing pause allows. False: not now."""
        if self._is_elsewhere:
            self._is_elsewhere = False
            self.close()
        if not self.is_connected and time.monotonic() < self._next_try_s:
            return False
        try:
            self.connect()
        except LinkError as error:
            self._back_off(str(error))
            return False
        return True

    def connect(self) -> None:
        """Connect and load the scripts, unless that is done. Raises LinkError."""
        if self._socket is None:
            self._scripts_loaded = False
            try:
                self._connection.connect()
            except (redis_errors.RedisError, OSError) as error:
                self.close()
                raise LinkError(tls_trouble(error) or tls_hint(error) or str(error)) from error
            self._socket = self._connection._sock  # redis-py has no public way to it
            self._reader = _new_reader()
            self.generation += 1
        if not self._scripts_loaded:
            self._load_scripts()

    def _load_scripts(self) -> None:
        for outcome in self.exchange([(b"SCRIPT", b"LOAD", script.source) for script in lua.ALL]):
            if isinstance(outcome, Failed):
                self.close()
                raise LinkError(f"{outcome.code} {outcome.message}")
        self._scripts_loaded = True
        self._pause_s = 0.0

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send all commands together and read all replies; one outcome each, `Failed` where there is no result.

        When the connection is lost on the way, the commands without a reply come out as LOST.
        """
        self.start(commands)
        return self.finish(len(commands))

    def start(self, commands: Sequence[Command]) -> None:
        """The first half of `exchange`: send. A failure shows in `finish`, which must follow."""
        with contextlib.suppress(LinkError):
            self.send(*commands)

    def finish(self, num_commands: int) -> list[Any]:
        """The second half of `exchange`: read the replies to as many commands."""
        outcomes: list[Any] = []
        try:
            read = self.read
            for _ in range(num_commands):
                outcomes.append(read())  # noqa: PERF401  those before a failure are kept
        except LinkError as error:
            outcomes += [Failed("LOST", str(error))] * (num_commands - len(outcomes))
        self.heed(outcomes)
        return outcomes

    def heed(self, outcomes: Sequence[Any]) -> None:
        """Do what errors of the server call for. `exchange` does it by itself, `read` does not."""
        codes = {outcome.code for outcome in outcomes if isinstance(outcome, Failed)}
        if "NOSCRIPT" in codes:
            self._scripts_loaded = False
        if codes & self._leave_on:
            # After a failover the name may lead to another node; a server that loads is asked again after a pause.
            self._back_off(" ".join(sorted(codes)))

    def _back_off(self, reason: str) -> None:
        self.last_error = reason
        self._pause_s = min(max(self._pause_s * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        # not all at once, when a server comes back to a thousand workers
        self._next_try_s = time.monotonic() + self._pause_s * _RANDOM.uniform(0.5, 1.0)
        self.close()

    def send(self, *commands: Command) -> None:
        """Send commands without waiting for their replies. Raises LinkError."""
        try:
            if self._socket is None:
                raise LinkError("not connected")
            self._socket.sendall(b"".join([each if isinstance(each, bytes) else _pack(each) for each in commands]))
        except OSError as error:
            self._back_off(str(error))
            raise LinkError(str(error)) from error

    def read(self) -> Any:
        """Read the next reply; an error of the server comes out as `Failed`. Raises LinkError."""
        reply = self._reader.gets()
        while reply is _NOT_ENOUGH:
            self._receive()
            reply = self._reader.gets()
        return as_failed(str(reply)) if type(reply) is _ReplyError else reply

    def _receive(self) -> None:
        try:
            if self._socket is None:
                raise LinkError("not connected")
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            self._back_off(str(error))
            raise LinkError(str(error)) from error
        if not data:
            self._back_off("the server closed the connection")
            raise LinkError("the server closed the connection")
        self._reader.feed(data)

    def fileno(self) -> int:
        """The socket's number, for `select`. Raises LinkError without a connection."""
        if self._socket is None:
            raise LinkError("not connected")
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket. The next `ensure` makes a new connection."""
        self._socket = None
        self._connection.disconnect()


def _new_reader() -> Any:
    return _hiredis.Reader(replyError=_ReplyError, notEnoughData=_NOT_ENOUGH)
