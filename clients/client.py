"""The client that waits: submit requests, follow their streams, cancel them."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self, Unpack

import redis

from . import steps
from .events import Event
from .following import DEFAULT_TIMEOUT_S, Following, Limit
from .keys import DEFAULT_PREFIX, DEFAULT_QUEUE, Keys, Priority
from .link import Link
from .reader import Reader
from .results import Collector, Result
from .steps import CancelOutcome, Policy
from .submission import Format, Options, build


class Client:
    """One queue, seen from a backend service. May be shared by threads; a stream belongs to one thread at a time.

    `target` is an address in a form of `address` (one server, sentinels, a Cluster), or a redis.Redis or RedisCluster,
    which stays the caller's. Raises ConfigError for a name, URL or client that cannot be; nothing is sent before the
    first call. Each open stream holds a connection.
    """

    def __init__(
        self,
        target: str | redis.Redis | redis.RedisCluster = "redis://localhost:6379/0",
        *,
        prefix: str = DEFAULT_PREFIX,
        queue: str = DEFAULT_QUEUE,
        policy: Policy | None = None,
    ) -> None:
        self.keys = Keys(prefix, queue)
        self._policy = policy or Policy()
        self._link = Link.to(target)

    def submit(
        self,
        prompt: str | None = None,
        *,
        id: str | None = None,  # noqa: A002  (the protocol's word for it)
        priority: Priority = "normal",
        fmt: Format = "msgpack",
        **options: Unpack[Options],
    ) -> Handle:
        """Queue a request: a `prompt`, or `messages` or `prompt_token_ids` among the options.

        With an `id` of the caller's the same call may be made any number of times, and is one request. Raises
        InvalidJobError, ConfigError, ConflictError, QueueFullError, UnavailableError, ServerError.
        """
        job = build({"prompt": prompt, **options}, id, priority, fmt)
        added = self._link.run(steps.submit(job, self.keys, self._policy))
        return Handle(self, job.id, added)

    def stream(
        self,
        id: str,  # noqa: A002
        cursor: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        *,
        raise_on_error: bool = True,
    ) -> Stream:
        """Follow a request from its beginning, or from a kept `cursor`.

        `timeout_s` is the longest wait for the next entry. Raises ConfigError.
        """
        return self._follow(Reader(id, cursor or ""), Limit(timeout_s), raise_on_error)

    def result(
        self,
        id: str,  # noqa: A002
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        *,
        raise_on_error: bool = True,
    ) -> Result:
        """Wait for the whole answer, for `timeout_s` at most.

        Raises WaitTimeoutError and the other StreamErrors, ServerError, and RequestFailedError if `raise_on_error`.
        """
        collector = Collector(id)
        with self._follow(Reader(id), Limit(timeout_s, total=True), raise_on_error=False) as stream:
            for event in stream:
                collector.add(event)
        return collector.result(raise_on_error=raise_on_error)

    def cancel(self, id: str) -> CancelOutcome:  # noqa: A002
        """End a request, or ask its worker to. Raises ConfigError, UnavailableError, ServerError, StreamError."""
        return self._link.run(steps.cancel(id, self.keys, self._policy))

    def close(self) -> None:
        """Close the connections, unless the Redis client is the caller's."""
        self._link.close()

    def _follow(self, reader: Reader, limit: Limit, raise_on_error: bool) -> Stream:
        return Stream(self._link.reading(), Following(reader, self.keys, limit, raise_on_error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Handle:
    """A request that was submitted: its `id`, and whether this call `added` it or found it there."""

    def __init__(self, client: Client, request_id: str, added: bool) -> None:
        self._client = client
        self.id = request_id
        self.added = added

    def stream(
        self, cursor: str | None = None, timeout_s: float | None = DEFAULT_TIMEOUT_S, *, raise_on_error: bool = True
    ) -> Stream:
        """As Client.stream."""
        return self._client.stream(self.id, cursor, timeout_s, raise_on_error=raise_on_error)

    def result(self, timeout_s: float | None = DEFAULT_TIMEOUT_S, *, raise_on_error: bool = True) -> Result:
        """As Client.result."""
        return self._client.result(self.id, timeout_s, raise_on_error=raise_on_error)

    def cancel(self) -> CancelOutcome:
        """As Client.cancel."""
        return self._client.cancel(self.id)


class Stream:
    """The events of a request, in order, until its end; a context manager that gives its connection back.

    Reconnects by itself. Failures are raised: StreamError, ServerError, and RequestFailedError for a request that
    ended with an error, unless that is wanted as its `Finished` event. After a WaitTimeoutError one may go on.
    """

    def __init__(self, link: Link, following: Following) -> None:
        self._link = link
        self._following = following

    @property
    def cursor(self) -> str:
        """Where `Client.stream` can go on from: behind the last event given; '' before the first."""
        return self._following.cursor

    def close(self) -> None:
        """Give the connection back. Iterating again takes another."""
        self._following.interrupted()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        try:
            while (event := self._following.take()) is None and not self._following.done:
                self._following.add(self._link.run(self._following.fetch(self._link.max_block_ms)))
        except BaseException:  # an interrupt or a cancellation too: the connection must not stay open
            self.close()
            raise
        if event is None:
            self.close()
            raise StopIteration
        return event
