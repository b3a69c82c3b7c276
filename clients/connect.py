"""From an address to redis-py's clients and pools, for waiting and for asyncio. Nothing is sent yet.

Everything raises ConfigError for options that redis-py does not know or take.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import redis
from redis import asyncio as aio
from redis import exceptions
from redis.asyncio import cluster as aio_cluster
from redis.asyncio import connection as aio_connection
from redis.asyncio import sentinel as aio_sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import AbstractConnection
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool

from . import sentinel
from .address import Address, PasswordFile, parse_address
from .errors import ConfigError
from .tls import check_tls

# Of a server's options, those that a connection to a sentinel takes too.
_SHARED_WITH_SENTINELS: Final = ("ssl_", "socket_keepalive")
# redis-py's cluster client is made for pools of its own.
_NOT_FOR_CLUSTERS: Final = ("retry",)

# A connection would say which library it is of (CLIENT SETINFO): two round trips, and where the user may not, two
# entries in the server's log of refusals.
_SAY_NO_LIBRARY: Final[Mapping[str, Any]] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)

OPTIONS: Final = (
    "password_file, sentinel_username, sentinel_password, sentinel_password_file, ssl_ca_certs, ssl_certfile, "
    "ssl_keyfile, ssl_password and ssl_check_hostname"
)  # those of docs/operations.md

Options = Mapping[str, Any]


def check_url(url: str) -> str:
    """Give `url` back if a client can be made of it, with the files that it names. Raises ValueError."""
    address = parse_address(url)
    for options in (address.options, address.sentinel_options):
        if isinstance(provider := options.get("credential_provider"), PasswordFile):
            try:
                provider.get_credentials()
            except exceptions.ConnectionError as error:
                raise ConfigError(str(error), "target") from None
    make_pool(address.at(address.nodes[0]) if address.kind == "cluster" else address, address.options)
    return url


def make_pool(address: Address, options: Options) -> redis.ConnectionPool:
    """A pool for one server, or for the master that sentinels name. `options` are redis-py's, all of them."""
    options = _for(address, {"retry": Retry(NoBackoff(), 0), **options})
    check_tls(address, options)
    with _refusing():
        if address.kind == "sentinel":
            pool = SentinelConnectionPool(
                address.service,
                make_finder(address, options),
                ssl=address.tls,
                redis_connect_func=sentinel.on_connect,
                **options,
            )
        else:
            pool = redis.ConnectionPool(connection_class=_kind(address, redis), **_place(address), **options)
        pool.connection_class(**pool.connection_kwargs)  # sends nothing, and finds an option that there is not
        return pool


def make_finder(address: Address, options: Options) -> sentinel.MasterFinder:
    """What asks sentinels for the master."""
    own = {"retry": Retry(NoBackoff(), 0), **_sentinel_options(address, options)}
    return sentinel.MasterFinder(address.nodes, sentinel_kwargs=own)


def make_async_pool(address: Address, options: Options) -> aio.ConnectionPool:
    """As make_pool."""
    options = _for(address, {"retry": AsyncRetry(NoBackoff(), 0), **options})
    check_tls(address, options)
    with _refusing():
        if address.kind == "sentinel":
            own = {"retry": options["retry"], **_sentinel_options(address, options)}
            finder = sentinel.AsyncMasterFinder(list(address.nodes), sentinel_kwargs=own)
            how = {"ssl": address.tls, "redis_connect_func": sentinel.on_async_connect, **options}
            pool = aio_sentinel.SentinelConnectionPool(address.service, finder, **how)
        else:
            pool = aio.ConnectionPool(connection_class=_kind(address, aio_connection), **_place(address), **options)
        pool.connection_class(**pool.connection_kwargs)
        return pool


def make_cluster(address: Address, options: Options) -> redis.RedisCluster:
    """A client of a Cluster. It connects at once: raises redis.exceptions.RedisClusterException."""
    return redis.RedisCluster(
        startup_nodes=[ClusterNode(*node) for node in address.nodes],
        retry=Retry(NoBackoff(), 0),
        **_cluster_options(address, options),
    )


def make_async_cluster(address: Address, options: Options) -> aio.RedisCluster:
    """A client of a Cluster, which connects with the first command or `initialize`."""
    with _refusing():
        return aio.RedisCluster(
            startup_nodes=[aio_cluster.ClusterNode(*node) for node in address.nodes],
            retry=AsyncRetry(NoBackoff(), 0),
            **_cluster_options(address, options),
        )


@contextmanager
def _refusing() -> Generator[None]:
    try:
        yield
    except (TypeError, ValueError, exceptions.RedisError):
        # without the cause: its words may hold parts of the address, and so of a password
        message = f"not a Redis URL: an option that there is not, or a value that it cannot have; there are {OPTIONS}"
        raise ConfigError(message, "target") from None


def _kind(address: Address, module: Any) -> Any:
    if address.path:
        return module.UnixDomainSocketConnection
    return module.SSLConnection if address.tls else module.Connection


def _for(address: Address, options: Options) -> dict[str, Any]:
    """Without what a socket does not take."""
    options = {**_silence(address), **options}
    return {name: value for name, value in options.items() if not (address.path and name.startswith("socket_keep"))}


def _silence(address: Address) -> Options:
    """What keeps a new connection from saying which library it is of, where that is safe."""
    # What a server sends after a TLS handshake (session tickets) is only read with a first reply; unread, redis-py
    # takes it for a reply that nobody has waited for.
    return {} if address.tls else _SAY_NO_LIBRARY


def _place(address: Address) -> dict[str, Any]:
    if address.path:
        return {"path": address.path}
    [(host, port)] = address.nodes
    return {"host": host, "port": port}


def _sentinel_options(address: Address, options: Options) -> dict[str, Any]:
    shared = {name: value for name, value in options.items() if name.startswith(_SHARED_WITH_SENTINELS)}
    return {
        **shared,
        **_silence(address),
        **address.sentinel_options,
        "ssl": address.tls,
        "protocol": 2,
        "socket_timeout": sentinel.SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": sentinel.SENTINEL_TIMEOUT_S,
    }


def _cluster_options(address: Address, options: Options) -> dict[str, Any]:
    # redis-py leaves out, without a word, what its cluster client does not know: a single connection does not
    make_pool(address.at(address.nodes[0]), options)
    options = {**_silence(address), **options}
    kept = {name: value for name, value in options.items() if name not in _NOT_FOR_CLUSTERS and name != "db"}
    return {**kept, "ssl": True} if address.tls else kept
