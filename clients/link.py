"""How steps reach Redis: redis-py, with its defaults chosen on purpose, and its errors told apart.

- No silent retries: redis-py would send a write again after a lost reply, and reconnect without a word in between
  reads. Steps decide on that.
- A blocking read ends well before the socket's own limit.
- A stream is read on a connection of its own, so that a lost one is seen as an error.
- RESP2, and bytes as they are: a client that decodes replies cannot carry msgpack.

A client that a caller hands in keeps its own retries and limits: the protocol's checks hold with those too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator
from typing import Any, Final, TypeVar, cast

import redis
from redis import asyncio as aio
from redis import exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from .errors import ConfigError, ServerError
from .steps import MAX_BLOCK_MS, Command, LostReplyError, Pause, RunScript, Step

T = TypeVar("T")

SOCKET_TIMEOUT_S: Final = 5.0
# Errors of a server that cannot do it now: it starts, fails over, has no memory or disk, or is busy with a script.
_NOT_NOW = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.MasterDownError,
    exceptions.ClusterError,
)
_NOT_NOW_CODES = ("MISCONF", "NOREPLICAS", "UNBLOCKED", "BUSY", "LOADING", "MASTERDOWN", "OOM", "READONLY")
ERRORS = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
_FOR_GOOD = (exceptions.AuthenticationError, exceptions.AuthorizationError)
_MAX_REASON_LEN = 200
# redis-py's own limit is 100, and each open stream holds one: let the server's `maxclients` be the limit.
_MAX_CONNECTIONS = 1 << 20


def told_apart(error: Exception) -> Exception:
    """LostReplyError for what may pass, ServerError for what will not."""
    # A server that does not know a command repeats its arguments, and a prompt may be among them.
    reason = str(error).split(", with args beginning with", maxsplit=1)[0][:_MAX_REASON_LEN]
    reason = f"{type(error).__name__}: {reason}"
    if isinstance(error, _FOR_GOOD):
        return ServerError(reason)
    if isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError, OSError, *_NOT_NOW)):
        return LostReplyError(reason)
    if isinstance(error, exceptions.ResponseError) and str(error).startswith(_NOT_NOW_CODES):
        return LostReplyError(reason)
    return ServerError(reason)


def connection_options() -> dict[str, Any]:
    """What a client of our own is made with."""
    return {
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
        "socket_keepalive": True,
        "health_check_interval": 30,
        "max_connections": _MAX_CONNECTIONS,
    }


def check_client(client: Any) -> None:
    """Raises ConfigError for a client that turns replies into text: payloads are binary."""
    if client.get_encoder().decode_responses:
        raise ConfigError("the Redis client must not have decode_responses: payloads are binary", "target")


def max_block_ms(client: Any) -> int:
    """How long a blocking read of this client may take: at most half of its socket's limit."""
    pool = getattr(client, "connection_pool", None)
    options: dict[str, Any] = pool.connection_kwargs if pool is not None else {}
    limit_s = options.get("socket_timeout", SOCKET_TIMEOUT_S)
    return MAX_BLOCK_MS if not limit_s else max(1, min(MAX_BLOCK_MS, int(limit_s * 500)))


def routing(client: Any, key: str) -> dict[str, Any]:
    """Arguments for execute_command: in a cluster, the node of the key, which redis-py finds for few commands only."""
    find = getattr(client, "get_node_from_key", None)
    return {} if find is None else {"target_nodes": find(key)}


def script_by_sha(step: RunScript) -> tuple[Any, ...]:
    """For a server that has the script already."""
    return ("EVALSHA", step.script.sha, len(step.keys), *step.keys, *step.args)


def script_by_text(step: RunScript) -> tuple[Any, ...]:
    """The same with the script's text: the server keeps that, and in a cluster it is the node that lacks it."""
    return ("EVAL", step.script.source, len(step.keys), *step.keys, *step.args)


class Link:
    """Runs steps, waiting for each."""

    def __init__(self, client: redis.Redis | redis.RedisCluster, *, own: bool) -> None:
        self._client: Any = client
        self._own = own
        self.max_block_ms = max_block_ms(client)

    @classmethod
    def to(cls, target: object) -> Link:
        """To a URL, or through a client of the caller's. Raises ConfigError."""
        if isinstance(target, str):
            return cls(_from_url(redis.Redis, target, Retry(NoBackoff(), 0)), own=True)
        if not isinstance(target, redis.Redis | redis.RedisCluster):
            raise ConfigError("neither a URL nor a redis.Redis nor a redis.RedisCluster", "target")
        check_client(target)
        return cls(target, own=False)

    def run(self, steps: Generator[Step, Any, T]) -> T:
        """Run steps to their end and give what they return. Raises what they raise, and ServerError."""
        try:
            step = next(steps)
            while True:
                try:
                    reply = self._do(step)
                except LostReplyError as lost:
                    step = steps.throw(lost)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            return cast("T", stop.value)

    def reading(self) -> Link:
        """A link of its own for one reader."""
        return _ReadingLink(self._client, own=False)

    def close(self) -> None:
        """Close the connections, if the client is this link's own."""
        if self._own:
            self._client.close()

    def _connected(self) -> Any:
        return self._client

    def _do(self, step: Step) -> Any:
        try:
            match step:
                case Pause():
                    time.sleep(step.seconds)
                    return None
                case Command():
                    return self._connected().execute_command(*step.args, **routing(self._client, step.key))
                case RunScript():
                    options = routing(self._client, step.keys[0])
                    try:
                        return self._connected().execute_command(*script_by_sha(step), **options)
                    except exceptions.NoScriptError:
                        return self._connected().execute_command(*script_by_text(step), **options)
        except ERRORS as error:
            if isinstance(error, exceptions.ReadOnlyError):
                self._leave_node()
            raise told_apart(error) from None

    def _leave_node(self) -> None:
        """After a failover the address may lead to another node: let go of the idle connections to the old one."""
        pool = getattr(self._client, "connection_pool", None)  # a cluster's client finds its nodes by itself
        with contextlib.suppress(TypeError):  # the blocking pool of redis-py 6 can only disconnect all
            if pool is not None:
                pool.disconnect(inuse_connections=False)


class _ReadingLink(Link):
    """On one connection, taken from the client's pool by the first command and given back at the end."""

    _dedicated: Any = None

    def close(self) -> None:
        if self._dedicated is not None:
            self._dedicated.close()
            self._dedicated = None

    def _connected(self) -> Any:
        if isinstance(self._client, redis.RedisCluster):
            return self._client
        if self._dedicated is None:
            self._dedicated = self._client.client()
        return self._dedicated


class AsyncLink:
    """Runs steps, awaiting each."""

    def __init__(self, client: aio.Redis | aio.RedisCluster, *, own: bool) -> None:
        self._client: Any = client
        self._own = own
        self.max_block_ms = max_block_ms(client)

    @classmethod
    def to(cls, target: object) -> AsyncLink:
        """To a URL, or through a client of the caller's. Raises ConfigError."""
        if isinstance(target, str):
            return cls(_from_url(aio.Redis, target, AsyncRetry(NoBackoff(), 0)), own=True)
        if not isinstance(target, aio.Redis | aio.RedisCluster):
            raise ConfigError("neither a URL nor a redis.asyncio.Redis nor a redis.asyncio.RedisCluster", "target")
        check_client(target)
        return cls(target, own=False)

    async def run(self, steps: Generator[Step, Any, T]) -> T:
        """As Link.run."""
        try:
            step = next(steps)
            while True:
                try:
                    reply = await self._do(step)
                except LostReplyError as lost:
                    step = steps.throw(lost)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            return cast("T", stop.value)

    def reading(self) -> AsyncLink:
        """A link of its own for one reader."""
        return _AsyncReadingLink(self._client, own=False)

    async def close(self) -> None:
        """Close the connections, if the client is this link's own."""
        if self._own:
            await self._client.aclose()

    def _connected(self) -> Any:
        return self._client

    async def _do(self, step: Step) -> Any:
        try:
            match step:
                case Pause():
                    await asyncio.sleep(step.seconds)
                    return None
                case Command():
                    return await self._connected().execute_command(*step.args, **routing(self._client, step.key))
                case RunScript():
                    options = routing(self._client, step.keys[0])
                    try:
                        return await self._connected().execute_command(*script_by_sha(step), **options)
                    except exceptions.NoScriptError:
                        return await self._connected().execute_command(*script_by_text(step), **options)
        except ERRORS as error:
            if isinstance(error, exceptions.ReadOnlyError):
                await self._leave_node()
            raise told_apart(error) from None

    async def _leave_node(self) -> None:
        """As Link._leave_node."""
        pool = getattr(self._client, "connection_pool", None)
        with contextlib.suppress(TypeError):
            if pool is not None:
                await pool.disconnect(inuse_connections=False)


class _AsyncReadingLink(AsyncLink):
    """On one connection, taken from the client's pool by the first command and given back at the end."""

    _dedicated: Any = None

    async def close(self) -> None:
        if self._dedicated is not None:
            dedicated, self._dedicated = self._dedicated, None
            await dedicated.aclose()

    def _connected(self) -> Any:
        if isinstance(self._client, aio.RedisCluster):
            return self._client
        if self._dedicated is None:
            self._dedicated = self._client.client()
        return self._dedicated


def _from_url(kind: Any, url: str, retry: Any) -> Any:
    try:
        client = kind.from_url(url, retry=retry, **connection_options())
    except (ValueError, TypeError, exceptions.RedisError):
        # without the cause: its words may hold parts of the URL, and so of a password
        raise ConfigError("not a Redis URL", "target") from None
    check_client(client)  # options in the URL win over ours
    return client
