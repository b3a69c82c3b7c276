"""What a link sends its commands through: a Redis client of the caller's, or one of our own, made from an address.

One of our own finds out by itself that the server is a node of a Cluster: the first command that is answered with MOVED
makes it a Cluster's client. It was not carried out, so it is sent again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any, Final

import redis
from redis import asyncio as aio

from .address import Address, parse_address
from .connect import make_async_cluster, make_async_pool, make_cluster, make_pool
from .errors import ConfigError
from .steps import MAX_BLOCK_MS

SOCKET_TIMEOUT_S: Final = 5.0
# redis-py's own limit is 100, and each open stream holds one: let the server's `maxclients` be the limit.
_MAX_CONNECTIONS = 1 << 20
# What a client of our own is made with; what an address says wins.
_OPTIONS: Final[Mapping[str, Any]] = {
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
        raise _decoding()


def _decoding() -> ConfigError:
    return ConfigError("the Redis client must not have decode_responses: payloads are binary", "target")


def max_block_ms(socket_timeout_s: float | None) -> int:
    """How long a blocking read may take: at most half of its socket's limit."""
    return MAX_BLOCK_MS if not socket_timeout_s else max(1, min(MAX_BLOCK_MS, int(socket_timeout_s * 500)))


def _limit_s(client: Any) -> float | None:
    pool = getattr(client, "connection_pool", None)
    return SOCKET_TIMEOUT_S if pool is None else pool.connection_kwargs.get("socket_timeout", SOCKET_TIMEOUT_S)


class Target:
    """Shared by the links of one client, and so by threads."""

    def __init__(self, address: Address | None, client: Any, options: Mapping[str, Any]) -> None:
        self._address = address  # None: the client is the caller's
        self._client = client  # None: a Cluster's, not made yet
        self._options = options
        self._lock = threading.Lock()
        self.max_block_ms = max_block_ms(options["socket_timeout"] if address else _limit_s(client))

    @classmethod
    def of(cls, target: object) -> Target:
        """Of a URL, or of a client of the caller's. Raises ConfigError."""
        if not isinstance(target, str):
            if not isinstance(target, redis.Redis | redis.RedisCluster):
                raise ConfigError("neither a URL nor a redis.Redis nor a redis.RedisCluster", "target")
            check_client(target)
            return cls(None, target, {})
        address = _parse(target)
        options = {**_OPTIONS, **address.options}
        if address.kind == "cluster":
            make_pool(address.at(address.nodes[0]), options)  # finds an option that there is not
            return cls(address, None, options)
        return cls(address, redis.Redis.from_pool(make_pool(address, options)), options)

    def client(self) -> Any:
        """The client. Raises redis.RedisClusterException where it is a Cluster's that cannot be reached."""
        with self._lock:
            if self._client is None and self._address is not None:
                self._client = make_cluster(self._address, self._options)
            return self._client

    def is_cluster(self) -> bool:
        """Whether commands find their nodes by themselves."""
        return isinstance(self.client(), redis.RedisCluster)

    def become_cluster(self) -> bool:
        """After MOVED: take the server for a Cluster's node from now on. False: the client is the caller's."""
        if self._address is None or self._address.path:
            return False
        with self._lock:
            if not isinstance(self._client, redis.RedisCluster):
                single, self._client = self._client, make_cluster(self._address, self._options)
                single.close()
        return True

    def leave_node(self) -> None:
        """After a failover an address may lead to another node: let go of the idle connections to the old one."""
        pool = getattr(self._client, "connection_pool", None)  # a cluster's client finds its nodes by itself
        with contextlib.suppress(TypeError):  # the blocking pool of redis-py 6 can only disconnect all
            if pool is not None:
                pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Close the connections, if the client is our own."""
        if self._address is not None and self._client is not None:
            self._client.close()


class AsyncTarget:
    """The same for asyncio."""

    def __init__(self, address: Address | None, client: Any, options: Mapping[str, Any]) -> None:
        self._address = address
        self._client = client
        self._options = options
        self.max_block_ms = max_block_ms(options["socket_timeout"] if address else _limit_s(client))

    @classmethod
    def of(cls, target: object) -> AsyncTarget:
        """As Target.of."""
        if not isinstance(target, str):
            if not isinstance(target, aio.Redis | aio.RedisCluster):
                raise ConfigError("neither a URL nor a redis.asyncio.Redis nor a redis.asyncio.RedisCluster", "target")
            check_client(target)
            return cls(None, target, {})
        address = _parse(target)
        options = {**_OPTIONS, **address.options}
        if address.kind == "cluster":
            return cls(address, make_async_cluster(address, options), options)
        return cls(address, aio.Redis.from_pool(make_async_pool(address, options)), options)

    async def client(self) -> Any:
        """The client; a Cluster's knows its nodes. Raises redis.RedisClusterException if it cannot be reached."""
        if isinstance(self._client, aio.RedisCluster):
            await self._client.initialize()
        return self._client

    def is_cluster(self) -> bool:
        """As Target.is_cluster."""
        return isinstance(self._client, aio.RedisCluster)

    async def become_cluster(self) -> bool:
        """As Target.become_cluster."""
        if self._address is None or self._address.path:
            return False
        if not isinstance(self._client, aio.RedisCluster):
            single, self._client = self._client, make_async_cluster(self._address, self._options)
            await single.aclose()
        return True

    async def leave_node(self) -> None:
        """As Target.leave_node."""
        pool = getattr(self._client, "connection_pool", None)
        with contextlib.suppress(TypeError):
            if pool is not None:
                await pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """As Target.close."""
        if self._address is not None:
            await self._client.aclose()


def _parse(url: str) -> Address:
    try:
        address = parse_address(url)
    except ValueError as error:
        raise ConfigError(f"not a Redis URL: {error}", "target") from None
    if "decode_responses" in address.options:
        raise _decoding()
    return address
