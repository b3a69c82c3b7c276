"""A connection whose every retry is ours: pipelines in, one outcome per command out, and it tells when it is a new one.

redis-py's clients reconnect and send again by themselves. For the writing side that would be a duplicate nobody knows
of, so this uses redis-py's connection below the client: sockets, TLS, authentication and parsing are the library's;
when to connect, and what to send again, is decided here and by the callers. RESP version 2 is asked for, so that the
shape of replies does not depend on the library's default.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from redis import exceptions as redis_errors
from redis.backoff import NoBackoff
from redis.connection import Connection, parse_url  # pyright: ignore[reportUnknownVariableType]
from redis.retry import Retry

from . import lua
from .errors import LinkError
from .lua import Args

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
# Redis-py drops the first word of the errors it knows; here it is again.
_CODES: Final[tuple[tuple[type[Exception], str], ...]] = (
    (redis_errors.BusyLoadingError, "LOADING"),
    (redis_errors.OutOfMemoryError, "OOM"),
    (redis_errors.ReadOnlyError, "READONLY"),
    (redis_errors.NoScriptError, "NOSCRIPT"),
    (redis_errors.TryAgainError, "TRYAGAIN"),
    (redis_errors.ClusterDownError, "CLUSTERDOWN"),
    (redis_errors.MasterDownError, "MASTERDOWN"),
    (redis_errors.NoPermissionError, "NOPERM"),
    (redis_errors.AuthenticationError, "NOAUTH"),
)
# The command is not known to have done anything, and the reason passes: the same bytes again are right.
AGAIN: Final = frozenset(
    {"LOST", "LOADING", "OOM", "READONLY", "MISCONF", "TRYAGAIN", "NOSCRIPT"}
    | {"CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "BUSY"}
)


@dataclass(frozen=True, slots=True)
class Failed:
    """The outcome of a command without a result."""

    code: str  # the first word of the server's error; LOST where no reply came
    message: str

    @property
    def again(self) -> bool:
        """Whether to send the same bytes again: it is not known that anything was done, and the reason passes."""
        return self.code in AGAIN


def failed(error: Exception) -> Failed:
    """The outcome that stands for an error reply."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return Failed(code, str(error))
    text = str(error)
    return Failed(text.split(" ", 1)[0] if text else "ERR", text)


def make_connection(url: str, socket_timeout_s: float, name: str) -> Any:
    """An unconnected connection of redis-py that never retries and gives bytes."""
    options = cast("dict[str, Any]", parse_url(url))
    kind = options.pop("connection_class", Connection)
    for ours in ("retry_on_timeout", "retry_on_error", "decode_responses", "protocol", "health_check_interval"):
        options.pop(ours, None)
    for pool_only in ("max_connections", "timeout"):
        options.pop(pool_only, None)
    options.update(
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=socket_timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        client_name=name,
    )
    return kind(**options)


class Link:
    """One connection to one server node. Not thread-safe: each thread has its own.

    `generation` counts the connections made so far: whoever sees it change knows that replies may have been lost and
    that the server may be another one.
    """

    def __init__(self, url: str, socket_timeout_s: float, name: str) -> None:
        self._connection = make_connection(url, socket_timeout_s, name)
        self._scripts_loaded = False
        self._pause_s = 0.0
        self._next_try_s = 0.0
        self.generation = 0
        self.last_error = ""

    @property
    def is_connected(self) -> bool:
        """Whether a socket is open (as far as this side knows)."""
        return bool(self._connection.is_connected)

    def ensure(self) -> bool:
        """Connect if need be, at most as often as the growing pause allows. False: not now."""
        if not self.is_connected and time.monotonic() < self._next_try_s:
            return False
        try:
            self.connect()
        except LinkError as error:
            self.last_error = str(error)
            self._pause_s = min(max(self._pause_s * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._next_try_s = time.monotonic() + self._pause_s
            return False
        return True

    def connect(self) -> None:
        """Connect and load the scripts, unless that is done. Raises LinkError."""
        try:
            if not self.is_connected:
                self._scripts_loaded = False
                self._connection.connect()
                self.generation += 1
            if not self._scripts_loaded:
                self._load_scripts()
        except (redis_errors.RedisError, OSError) as error:
            self.close()
            raise LinkError(str(error)) from error

    def _load_scripts(self) -> None:
        for outcome in self._exchange([(b"SCRIPT", b"LOAD", script.source) for script in lua.ALL]):
            if isinstance(outcome, Failed):
                raise redis_errors.RedisError(f"{outcome.code} {outcome.message}")
        self._scripts_loaded = True
        self._pause_s = 0.0

    def exchange(self, commands: Sequence[Args]) -> list[object]:
        """Send all commands together and read all replies; one outcome each, `Failed` where there is no result.

        When the connection is lost on the way, the commands without a reply come out as LOST.
        """
        if not commands:
            return []
        outcomes = self._exchange(commands)
        codes = {outcome.code for outcome in outcomes if isinstance(outcome, Failed)}
        if "NOSCRIPT" in codes:
            self._scripts_loaded = False
        if codes & {"READONLY", "LOADING"}:
            # After a failover the name may lead to another node; a server that loads is asked again after a pause.
            self._back_off(" ".join(sorted(codes)))
        return outcomes

    def _exchange(self, commands: Sequence[Args]) -> list[object]:
        outcomes: list[object] = []
        try:
            self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
            outcomes.extend(self.read() for _ in commands)
        except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError) as error:
            self._back_off(str(error))
            lost = Failed("LOST", str(error))
            outcomes += [lost] * (len(commands) - len(outcomes))
        return outcomes

    def _back_off(self, reason: str) -> None:
        self.last_error = reason
        self._pause_s = min(max(self._pause_s * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._next_try_s = time.monotonic() + self._pause_s
        self.close()

    def send(self, command: Args) -> None:
        """Send one command without waiting for its reply. Raises LinkError."""
        try:
            self._connection.send_packed_command(self._connection.pack_command(*command), check_health=False)
        except (redis_errors.RedisError, OSError) as error:
            self._back_off(str(error))
            raise LinkError(str(error)) from error

    def read(self) -> object:
        """Read the next reply; an error reply comes out as `Failed`. Raises RedisError and OSError."""
        try:
            return self._connection.read_response(disable_decoding=True)
        except (redis_errors.ResponseError, redis_errors.BusyLoadingError) as error:
            return failed(error)

    def fileno(self) -> int:
        """The socket's number, for `select`. Raises LinkError without a connection."""
        socket = self._connection._sock  # pyright: ignore[reportPrivateUsage]
        if socket is None:
            raise LinkError("not connected")
        return int(socket.fileno())

    def close(self) -> None:
        """Close the socket. The next `ensure` makes a new connection."""
        self._connection.disconnect()
