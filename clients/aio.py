"""The client for asyncio: the same as `Client`, with `await`, `async for` and `async with`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, Unpack

from redis import asyncio as redis

from . import steps
from .events import Event
from .following import DEFAULT_TIMEOUT_S, Following, Limit
from .keys import DEFAULT_PREFIX, DEFAULT_QUEUE, Keys, Priority
from .link import AsyncLink
from .reader import Reader
from .results import Collector, Result
from .steps import CancelOutcome, Policy
from .submission import Format, Options, build


class AsyncClient:
    """One queue, seen from a backend service. For one event loop; a stream belongs to one task at a time.

    `target` is an address in a form of `address`, or a redis.asyncio Redis or RedisCluster, which stays the caller's.
    Raises ConfigError for a name, URL or client that cannot be; nothing is sent before the first call. Each open stream
    holds a connection.
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
        self._link = AsyncLink.to(target)

    async def submit(
        self,
        prompt: str | None = None,
        *,
        id: str | None = None,  # noqa: A002  (the protocol's word for it)
        priority: Priority = "normal",
        fmt: Format = "msgpack",
        **options: Unpack[Options],
    ) -> AsyncHandle:
        """Queue a request: a `prompt`, or `messages` or `prompt_token_ids` among the options.

        With an `id` of the caller's the same call may be made any number of times, and is one request. Raises
        InvalidJobError, ConfigError, ConflictError, QueueFullError, UnavailableError, ServerError.
        """
        job = build({"prompt": prompt, **options}, id, priority, fmt)
        added = await self._link.run(steps.submit(job, self.keys, self._policy))
        return AsyncHandle(self, job.id, added)

    def stream(
        self,
        id: str,  # noqa: A002
        cursor: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        *,
        raise_on_error: bool = True,
    ) -> AsyncStream:
        """Follow a request from its beginning, or from a kept `cursor`.

        `timeout_s` is the longest wait for the next entry. Raises ConfigError.
        """
        return self._follow(Reader(id, cursor or ""), Limit(timeout_s), raise_on_error)

    async def result(
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
        async with self._follow(Reader(id), Limit(timeout_s, total=True), raise_on_error=False) as stream:
            async for event in stream:
                collector.add(event)
        return collector.result(raise_on_error=raise_on_error)

    async def cancel(self, id: str) -> CancelOutcome:  # noqa: A002
        """End a request, or ask its worker to. Raises ConfigError, UnavailableError, ServerError, StreamError."""
        return await self._link.run(steps.cancel(id, self.keys, self._policy))

    async def close(self) -> None:
        """Close the connections, unless the Redis client is the caller's."""
        await self._link.close()

    def _follow(self, reader: Reader, limit: Limit, raise_on_error: bool) -> AsyncStream:
        return AsyncStream(self._link.reading(), Following(reader, self.keys, limit, raise_on_error))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncHandle:
    """A request that was submitted: its `id`, and whether this call `added` it or found it there."""

    def __init__(self, client: AsyncClient, request_id: str, added: bool) -> None:
        self._client = client
        self.id = request_id
        self.added = added

    def stream(
        self, cursor: str | None = None, timeout_s: float | None = DEFAULT_TIMEOUT_S, *, raise_on_error: bool = True
    ) -> AsyncStream:
        """As AsyncClient.stream."""
        return self._client.stream(self.id, cursor, timeout_s, raise_on_error=raise_on_error)

    async def result(self, timeout_s: float | None = DEFAULT_TIMEOUT_S, *, raise_on_error: bool = True) -> Result:
        """As AsyncClient.result."""
        return await self._client.result(self.id, timeout_s, raise_on_error=raise_on_error)

    async def cancel(self) -> CancelOutcome:
        """As AsyncClient.cancel."""
        return await self._client.cancel(self.id)


class AsyncStream:
    """The events of a request, in order, until its end; a context manager that gives its connection back.

    Reconnects by itself. Failures are raised: StreamError, ServerError, and RequestFailedError for a request that
    ended with an error, unless that is wanted as its `Finished` event. After a WaitTimeoutError one may go on.
    """

    def __init__(self, link: AsyncLink, following: Following) -> None:
        self._link = link
        self._following = following

    @property
    def cursor(self) -> str:
        """Where `AsyncClient.stream` can go on from: behind the last event given; '' before the first."""
        return self._following.cursor

    async def close(self) -> None:
        """Give the connection back. Iterating again takes another."""
        self._following.interrupted()
        await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            while (event := self._following.take()) is None and not self._following.done:
                self._following.add(await self._link.run(self._following.fetch(self._link.max_block_ms)))
        except BaseException:  # an interrupt or a cancellation too: the connection must not stay open
            await self.close()
            raise
        if event is None:
            await self.close()
            raise StopAsyncIteration
        return event
