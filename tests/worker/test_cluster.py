"""A worker on a Redis Cluster: requests' streams on all nodes, the queue on one, slots that move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from redis import asyncio as aio

from headrace.clients import AsyncClient, Client
from headrace.worker.cluster import slot_of
from headrace.worker.errors import ServerUnsuitableError
from tests.support.cluster import Cluster
from tests.support.rig import Rig
from tests.support.worker_process import WorkerProcess, wait_until

JOB = {"prompt": "Hello", "max_tokens": 30, "seed": 3, "ignore_eos": True}


@pytest.fixture
def rig(cluster: Cluster, prefix: str) -> Iterator[Rig]:
    """A queue on the cluster; the invariants are checked on every node."""
    made = Rig(cluster, prefix, cluster.client())  # type: ignore[arg-type]
    yield made
    made.close()


def test_requests_on_all_nodes_are_answered(cluster: Cluster, rig: Rig) -> None:
    worker = rig.worker()
    for number in range(20):
        rig.add(f"my-{number}", JOB)
    rig.wait_done(*rig.submitted)
    rig.wait_empty()
    owners = {cluster.owner_of(rig.keys.out(each)) for each in rig.submitted}
    assert owners == {0, 1, 2}
    assert all(rig.num_tokens(each) == 30 for each in rig.submitted)
    assert worker.stop() == 0


def test_cancel_and_dead_letters(rig: Rig) -> None:
    rig.worker(step_time_s=0.01)
    for number in range(6):
        rig.add(f"my-{number}", {**JOB, "max_tokens": 1000})
        rig.add(f"bad-{number}", "{")
    for number in range(6):
        rig.wait_tokens(f"my-{number}", 2)
        rig.client.set(rig.keys.cancel(f"my-{number}"), "1", px=86_400_000)
    rig.wait_done(*rig.submitted)
    rig.wait_empty()
    assert len(rig.dead()) == 6


def test_killed_and_resumed(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    first = start_worker(rig.server, rig.prefix, step_time_s=0.02, lease_s=1.0)
    for number in range(10):
        rig.add(f"my-{number}", JOB)
    wait_until(lambda: all(rig.num_tokens(each) >= 1 for each in rig.submitted))
    first.kill()
    rig.worker(lease_s=1.0)
    rig.wait_done(*rig.submitted)
    assert all(rig.num_tokens(each) == 30 for each in rig.submitted)
    assert all(len(rig.started(each)) == 2 for each in rig.submitted)


@pytest.mark.parametrize("what", ["stream", "queue"])
def test_a_slot_moves_while_a_request_runs(cluster: Cluster, rig: Rig, what: str) -> None:
    worker = rig.worker(step_time_s=0.02, lease_s=3.0)
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 3)
    key = rig.keys.out("my-1") if what == "stream" else rig.keys.jobs()
    cluster.move(key, (cluster.owner_of(key) + 1) % 3)
    rig.wait_done("my-1")
    rig.wait_empty()
    assert rig.num_tokens("my-1") == 60
    assert worker.counters.attempts == 1
    rig.add("after", JOB)
    rig.wait_done("after")


def test_the_client_library_too(cluster: Cluster, rig: Rig) -> None:
    rig.worker(script="echo")
    with Client(cluster.client(), prefix=rig.prefix) as client:
        for number in range(5):
            assert client.submit(f"text {number}").result(timeout_s=5).choices[0].text == f"text {number}"


async def test_the_async_client_outlives_a_change_of_its_map(cluster: Cluster, rig: Rig) -> None:
    """redis-py then closes all connections, those that other tasks are about to write to as well."""
    rig.worker(script="echo")
    async with aio.RedisCluster.from_url(cluster.url) as own, AsyncClient(own, prefix=rig.prefix) as client:

        async def ask(number: int) -> str:
            handle = await client.submit(f"text {number}")
            return (await handle.result(timeout_s=10)).choices[0].text

        answers = asyncio.gather(*[ask(number) for number in range(20)])
        for _ in range(40):
            await own.aclose()
            await asyncio.sleep(0.02)
        assert await answers == [f"text {number}" for number in range(20)]


def test_every_node_must_keep_what_it_has(cluster: Cluster, rig: Rig) -> None:
    cluster.nodes[2].client().config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ServerUnsuitableError, match="maxmemory-policy"):
            rig.worker()
    finally:
        cluster.nodes[2].client().config_set("maxmemory-policy", "noeviction")


def test_slots() -> None:
    assert slot_of("headrace:{default}:jobs") == slot_of(b"headrace:{default}:worker:x")
    assert slot_of("foo") == 12182
