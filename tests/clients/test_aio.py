"""The client for asyncio: the same steps, awaited; and what only a task can do, be cancelled."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable

import pytest
import redis
from redis import asyncio as aio

from headrace.clients import (
    AsyncClient,
    AsyncHandle,
    AsyncStream,
    Client,
    ConflictError,
    ErrorInfo,
    Event,
    ExpiredError,
    Finished,
    GapError,
    Handle,
    Keys,
    Policy,
    QueueFullError,
    RequestFailedError,
    Stream,
    Tokens,
    UnavailableError,
    WaitTimeoutError,
)
from headrace.clients.lua import APPEND
from tests.clients.hand_worker import HandWorker
from tests.support.proxy import Proxy
from tests.support.server import Server


@pytest.fixture
async def far(server: Server, keys: Keys) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, prefix=keys.prefix, queue=keys.queue, policy=Policy(give_up_s=5)) as made:
        yield made


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens | Finished))


@pytest.mark.parametrize(("plain", "awaited"), [(Client, AsyncClient), (Handle, AsyncHandle), (Stream, AsyncStream)])
def test_both_clients_have_the_same_methods_and_parameters(plain: type, awaited: type) -> None:
    def surface(kind: type) -> dict[str, list[str]]:
        names = [name for name in vars(kind) if not name.startswith("_")] + ["__init__"]
        return {
            name: list(inspect.signature(getattr(kind, name)).parameters)
            for name in names
            if callable(getattr(kind, name))
        }

    assert surface(plain) == surface(awaited)


async def test_a_whole_round(far: AsyncClient, work: Callable[..., HandWorker], raw: redis.Redis, keys: Keys) -> None:
    handle = await far.submit("Hello", id="a", fmt="json")
    assert handle.added
    assert not (await far.submit("Hello", id="a", fmt="json")).added
    with pytest.raises(ConflictError):
        await far.submit("Goodbye", id="a")
    worker = work("a", kind="json")
    async with handle.stream(timeout_s=5) as stream:
        await anext(stream)
        worker.start()
        await anext(stream)
        worker.tokens("abc")
        assert (await anext(stream)).text == "abc"
        cursor = stream.cursor
        assert await handle.cancel() == "requested"
        worker.finish("cancelled", "d")
        assert [event.text async for event in stream] == ["d"]
    async with far.stream("a", cursor, timeout_s=5) as stream:
        assert text_of([event async for event in stream]) == "d"
    assert (await handle.result(timeout_s=5)).text == "abcd"
    assert await far.cancel("a") == "already finished"
    assert await (await far.submit("x")).cancel() == "cancelled"
    assert await far.cancel("unknown") == "unknown"


async def test_errors_are_the_same(
    server: Server, far: AsyncClient, work: Callable[..., HandWorker], raw: redis.Redis, keys: Keys
) -> None:
    worker = work("failed")
    worker.start()
    worker.finish("error", error=ErrorInfo("internal", "broken"))
    with pytest.raises(RequestFailedError):
        await far.result("failed")
    async with far.stream("failed", timeout_s=5) as stream:
        with pytest.raises(RequestFailedError):
            [event async for event in stream]
    with pytest.raises(WaitTimeoutError):
        await far.result("unknown", timeout_s=0.05)
    worker = work("gap")
    worker.start()
    worker.tokens("x", index=3)
    with pytest.raises(GapError):
        await far.result("gap", timeout_s=5)
    async with AsyncClient(server.url, prefix=keys.prefix, queue=keys.queue, policy=Policy(max_backlog=0)) as full:
        with pytest.raises(QueueFullError):
            await full.submit("x")
    raw.delete(keys.out("gap"))
    with pytest.raises(ExpiredError):
        async with far.stream("gap", "1-1;;3", timeout_s=5) as stream:
            await anext(stream)


async def test_many_streams_at_once_on_one_loop(far: AsyncClient, work: Callable[..., HandWorker]) -> None:
    async def follow(number: int) -> str:
        async with far.stream(f"a{number}", timeout_s=10) as stream:
            return text_of([event async for event in stream])

    following = [asyncio.create_task(follow(number)) for number in range(10)]
    workers = [work(f"a{number}") for number in range(10)]
    for worker in workers:
        worker.start()
    for number, worker in enumerate(workers):
        worker.tokens(f"number {number}")
        await asyncio.sleep(0)
        worker.finish()
    assert await asyncio.gather(*following) == [f"number {number}" for number in range(10)]


async def test_more_streams_than_redis_py_has_connections_by_default(
    far: AsyncClient, work: Callable[..., HandWorker]
) -> None:
    worker = work("a")
    worker.start()
    streams = [far.stream("a", timeout_s=3) for _ in range(110)]
    await asyncio.gather(*(anext(stream) for stream in streams))  # each holds its connection from here on
    worker.finish(text="abc")
    assert [(await anext(stream)).text for stream in streams] == ["abc"] * 110
    for stream in streams:
        await stream.close()


async def test_a_cancelled_task_leaves_nothing_half_read(
    server: Server, keys: Keys, work: Callable[..., HandWorker]
) -> None:
    pool = aio.BlockingConnectionPool.from_url(server.url, max_connections=2, timeout=2)
    client = AsyncClient(aio.Redis(connection_pool=pool), prefix=keys.prefix, queue=keys.queue)
    worker = work("a")
    worker.start()
    for character in "abc":
        stream = client.stream("a", timeout_s=10)
        waiting = asyncio.create_task(anext(aiter(stream)))
        await waiting  # `started`, or what came since
        waiting = asyncio.create_task(_drain(stream))
        await asyncio.sleep(0.05)  # it waits in a blocking read now
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        worker.tokens(character)
        # the same connections serve what comes next, and get their own replies
        assert await client.cancel("a") == "requested"
    worker.finish()
    assert (await client.result("a", timeout_s=5)).text == "abc"
    await pool.disconnect()


async def _drain(stream: AsyncStream) -> None:
    async for _ in stream:
        pass


async def test_a_stream_that_was_cancelled_goes_on(far: AsyncClient, work: Callable[..., HandWorker]) -> None:
    worker = work("a")
    worker.start()
    stream = far.stream("a", timeout_s=10)
    assert (await anext(stream)).attempt == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await anext(stream)
    worker.tokens("x")
    worker.finish()
    assert text_of([event async for event in stream]) == "x"


@pytest.mark.parametrize("command", [b"XRANGE", b"EVALSHA", b"XADD", b"XREAD"])
async def test_a_lost_reply_changes_nothing(
    server: Server, keys: Keys, proxy_to: Callable[..., Proxy], raw: redis.Redis, work: Callable[..., HandWorker],
    command: bytes,
) -> None:  # fmt: skip
    raw.script_load(APPEND.source)
    proxy = proxy_to(server)
    loss = proxy.lose_reply(command)
    policy = Policy(max_backlog=9)  # so that it looks before it writes
    async with AsyncClient(proxy.url, prefix=keys.prefix, queue=keys.queue, policy=policy) as client:
        handle = await client.submit("Hello", id="a")
        assert raw.xlen(keys.out("a")) == 1
        worker = work("a")
        worker.start()
        worker.finish(text="abc")
        assert (await handle.result(timeout_s=10)).text == "abc"
    assert loss.num_lost == 1


async def test_connections_killed_while_reading(own_server: Callable[..., Server]) -> None:
    server, keys = own_server(), Keys()
    raw = server.client()
    worker = HandWorker(raw, keys, "a")
    worker.start()
    async with AsyncClient(server.url) as client:
        following = asyncio.create_task(client.result("a", timeout_s=10))
        for character in "never twice":
            worker.tokens(character)
            raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.01)
        worker.finish()
        assert (await following).text == "never twice"
    raw.close()


async def test_giving_up(server: Server, keys: Keys, proxy_to: Callable[..., Proxy]) -> None:
    proxy = proxy_to(server)
    proxy.refuse()
    async with AsyncClient(proxy.url, prefix=keys.prefix, queue=keys.queue, policy=Policy(give_up_s=0.2)) as client:
        started_s = time.monotonic()
        with pytest.raises(UnavailableError):
            await client.submit("Hello")
        with pytest.raises(WaitTimeoutError):
            await client.result("a", timeout_s=0.2)
        assert time.monotonic() - started_s < 3


async def test_a_script_that_the_server_has_not(far: AsyncClient, raw: redis.Redis) -> None:
    raw.script_flush()
    assert (await far.submit("Hello")).added
