"""The address of a server leads to another node, and connections to the old one, now read-only, stay open."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis
from redis import asyncio as aio

from headrace.clients import AsyncClient, Client, Policy
from tests.support.proxy import Proxy
from tests.support.server import Server
from tests.support.worker_process import wait_until

POLICY = Policy(give_up_s=4.0)


class Pair:
    """Two nodes behind one address; the second has the first one's data."""

    def __init__(self, own_server: Callable[..., Server], proxy_to: Callable[..., Proxy]) -> None:
        self.old = own_server("--repl-diskless-sync-delay", "0")
        self.new = own_server("--replicaof", "127.0.0.1", str(self.old.port))
        self.proxy = proxy_to(self.old)

    def fail_over(self) -> None:
        """The second is the primary from now on, the first its replica."""
        with self.old.client() as old, self.new.client() as new:
            wait_until(lambda: new.info("replication")["master_link_status"] == "up")
            old.set("mark", "1", px=60_000)  # what is waited for is this connection's own last write
            assert old.execute_command("WAIT", 1, 3000) == 1
            self.proxy._target_port = self.new.port
            new.execute_command("REPLICAOF", "NO", "ONE")
            old.execute_command("REPLICAOF", "127.0.0.1", str(self.new.port))

    def ids(self) -> list[str]:
        """Requests that are queued on the new node."""
        with self.new.client() as new:
            return [fields[b"id"].decode() for _, fields in new.xrange("headrace:{default}:jobs")]


@pytest.fixture
def pair(own_server: Callable[..., Server], proxy_to: Callable[..., Proxy]) -> Pair:
    return Pair(own_server, proxy_to)


@pytest.mark.parametrize("whose", ["own", "the caller's"])
def test_a_client_that_waits(pair: Pair, whose: str) -> None:
    target = pair.proxy.url if whose == "own" else redis.Redis.from_url(pair.proxy.url)
    with Client(target, policy=POLICY) as client:
        client.submit("Hello", id="before")
        running = client.submit("Hello", id="cancelled")
        pair.fail_over()
        client.submit("Hello", id="after")
        assert running.cancel() == "cancelled"
        assert pair.ids() == ["before", "cancelled", "after"]


async def test_an_asynchronous_client(pair: Pair) -> None:
    async with AsyncClient(pair.proxy.url, policy=POLICY) as client:
        await client.submit("Hello", id="before")
        pair.fail_over()
        await client.submit("Hello", id="after")
        assert pair.ids() == ["before", "after"]


async def test_an_asynchronous_client_of_the_callers(pair: Pair) -> None:
    async with aio.Redis.from_url(pair.proxy.url) as own:
        client = AsyncClient(own, policy=POLICY)
        await client.submit("Hello", id="before")
        pair.fail_over()
        await client.submit("Hello", id="after")
        assert pair.ids() == ["before", "after"]
