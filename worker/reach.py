"""Reach the server that the flags name, or say in one line why not."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .connection_url import redact
from .exit_codes import CommandError, ExitCode
from .settings import ServerFlags

TIMEOUT_S = 5.0


@contextmanager
def connected(settings: ServerFlags) -> Generator[redis.Redis]:
    """A client of the server, which has answered. It gives bytes and never retries. Raises CommandError."""
    url = settings.url()
    client = redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]  (its options are untyped)
        url,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        client_name="headrace-command",
    )
    with client:
        try:
            client.execute_command("PING")  # pyright: ignore[reportUnknownMemberType]
            yield client
        except (redis.ConnectionError, redis.TimeoutError, redis.AuthenticationError) as error:
            message = f"cannot use the server at {redact(url)}: {error}"
            raise CommandError(message, ExitCode.SERVER_UNAVAILABLE) from error


def check_reachable(settings: ServerFlags) -> str:
    """The server's address with its password, once it has answered. Raises CommandError."""
    with connected(settings):
        return settings.url()
