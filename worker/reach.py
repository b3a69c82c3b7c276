"""Reach the server that the flags name, or say in one line why not."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import redis
from redis.exceptions import MovedError, NoPermissionError

from ..clients.address import Address, parse_address, redact_address
from ..clients.connect import make_cluster, make_pool
from ..clients.keys import Keys
from ..clients.tls import tls_hint, tls_trouble
from .exit_codes import CommandError, ExitCode
from .settings_server import ServerFlags, by_flags

TIMEOUT_S = 5.0


@contextmanager
def connected(settings: ServerFlags, *, anywhere: bool = False) -> Generator[redis.Redis]:
    """A client of the server that has the queue, or of any that answers: it gives bytes and never retries.

    Raises CommandError.
    """
    key = Keys(settings.prefix, settings.queue).jobs()
    address = parse_address(settings.url())
    with _explained(settings):
        if address.kind != "cluster":
            with _single(address) as client:
                if anywhere or not _is_moved(client, key):
                    yield client
                    return
        with make_cluster(address, _options(address)) as cluster:
            nodes: Any = cluster
            yield (nodes.get_default_node() if anywhere else nodes.get_node_from_key(key)).redis_connection


def check_reachable(settings: ServerFlags) -> str:
    """The server's address with its password, once it has answered. Raises CommandError."""
    url = settings.url()
    address = parse_address(url)
    with _explained(settings):
        if address.kind == "cluster":
            make_cluster(address, _options(address)).close()
        else:
            with _single(address) as client:
                client.execute_command("PING")  # pyright: ignore[reportUnknownMemberType]
    return url


def _is_moved(client: redis.Redis, key: str) -> bool:
    """Whether the server is a node of a Cluster, and another one has the key."""
    try:
        client.execute_command("EXISTS", key)  # pyright: ignore[reportUnknownMemberType]
    except MovedError:
        return True
    except redis.ResponseError:
        pass  # a user with few rights: what is really asked for will tell
    return False


def _single(address: Address) -> redis.Redis:
    return redis.Redis.from_pool(make_pool(address, _options(address)))


def _options(address: Address) -> dict[str, object]:
    limits = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
    return {**address.options, **limits, "protocol": 2, "decode_responses": False}


@contextmanager
def _explained(settings: ServerFlags) -> Generator[None]:
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError, redis.RedisClusterException) as error:
        trouble = tls_trouble(error) or tls_hint(error)
        reason = by_flags(trouble) if trouble else _words(error, settings)
        message = f"cannot use the server at {redact_address(settings.url())}: {reason}"
        raise CommandError(message, ExitCode.SERVER_UNAVAILABLE) from error


def _words(error: Exception, settings: ServerFlags) -> str:
    """What the server, or what is beneath it, said; with what may be meant by it."""
    words = str(error).rstrip(". ")
    address = parse_address(settings.url())
    if isinstance(error, NoPermissionError):
        return f"{words}; ACL SETUSER {address.user} can let it (docs/operations.md, Users with few rights)"
    if isinstance(error.__context__, ConnectionResetError) and not address.tls:
        return f"{words}; the port may be one with TLS, which rediss is for"
    return words
