"""A worker on a Redis Cluster: requests' streams on all nodes, the queue on one, slots that move."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from redis import asyncio as aio

from headrace.clients import AsyncClient, Client, Policy, ServerError
from headrace.clients.keys import Keys
from headrace.worker.cluster import slot_of
from headrace.worker.errors import ServerUnavailableError, ServerUnsuitableError
from tests.support.cluster import Cluster, raw, start_cluster
from tests.support.command import Outcome
from tests.support.rig import Rig
from tests.support.server import Server
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


def test_a_slot_left_half_moved_holds_up_nobody_else(cluster: Cluster, rig: Rig) -> None:
    """As an interrupted resharding leaves it: nothing can be appended in it, everywhere else everything goes on."""
    worker = rig.worker(step_time_s=0.01)
    rig.add("stuck", {**JOB, "max_tokens": 60})
    rig.wait_tokens("stuck", 3)
    key = rig.keys.out("stuck")

    def meanwhile() -> None:
        others = [f"other-{number}" for number in range(10)]
        for name in others:
            rig.add(name, JOB)
        rig.wait_done(*others)
        wait_until(lambda: rig.num_jobs() == 1, 15, "all others are acknowledged")
        assert not rig.is_done("stuck")

    calls = [meanwhile]
    cluster.move(key, (cluster.owner_of(key) + 1) % 3, lambda: calls.pop()() if calls else None)
    rig.wait_done("stuck")
    rig.wait_empty()
    assert rig.num_tokens("stuck") == 60
    assert worker.counters.attempts == 11


def test_a_cancel_waits_for_a_slot_half_moved(cluster: Cluster, rig: Rig) -> None:
    """Its script has two keys, of which only one is there: TRYAGAIN."""
    rig.worker(step_time_s=0.02)
    rig.add("my-1", {**JOB, "max_tokens": 1000})
    rig.wait_tokens("my-1", 3)
    key, pool = rig.keys.out("my-1"), ThreadPoolExecutor(1)
    before = cluster.errors()["TRYAGAIN"]
    with Client(cluster.url, prefix=rig.prefix) as client, pool:
        asked: list[Future[str]] = []

        def cancel() -> None:
            if not asked:
                asked.append(pool.submit(client.cancel, "my-1"))
                wait_until(lambda: cluster.errors()["TRYAGAIN"] > before + 20)
                assert not asked[0].done()

        cluster.move(key, (cluster.owner_of(key) + 1) % 3, cancel)
        assert asked[0].result(10) == "requested"
    assert rig.wait_done("my-1").reason == "cancelled"


def test_a_node_that_is_away_holds_up_only_its_requests(cluster: Cluster, rig: Rig) -> None:
    """Leases are renewed, jobs taken, answers written, as long as the queue's node and the requests' are there."""
    home = cluster.owner_of(rig.keys.jobs())
    away, other = (home + 1) % 3, (home + 2) % 3
    names = iter(f"my-{number}" for number in range(1000))
    there = [name for name in itertools.islice(names, 100) if cluster.owner_of(rig.keys.out(name)) in {home, other}]
    gone = next(name for name in names if cluster.owner_of(rig.keys.out(name)) == away)
    worker = rig.worker(step_time_s=0.01, lease_s=2.0, url=cluster.nodes[away].url)
    cluster.set_node_timeout(30_000)
    rig.open_ids.add(gone)
    entry_id = rig.add(gone, {**JOB, "max_tokens": 2000})
    rig.wait_tokens(gone, 3)
    try:
        cluster.nodes[away].kill()
        end_s = time.monotonic() + 3
        while time.monotonic() < end_s:
            rig.add(there.pop(), JOB)
            rig.wait_done(rig.submitted[-1], timeout_s=10)
            [row] = [each for each in rig.pending() if each["message_id"].decode() == entry_id]
            assert row["time_since_delivered"] < 2000
        assert worker.counters.lost_leases == 0
    finally:
        cluster.heal()
        cluster.set_node_timeout(2000)


@pytest.mark.parametrize("by", ["a node", "several, of which the first is gone", "a client of the caller's"])
async def test_the_client_library_too(cluster: Cluster, rig: Rig, by: str) -> None:
    url = cluster.url if by == "a node" else f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.nodes[1].port}"
    rig.worker(script="echo", url=url)
    with Client(cluster.client() if "caller" in by else url, prefix=rig.prefix) as client:
        for number in range(6):  # of which some lie on other nodes than the queue
            assert client.submit(f"text {number}").result(timeout_s=5).choices[0].text == f"text {number}"
        assert client.submit("text", id="my-1", max_tokens=1).cancel() in ("cancelled", "requested", "already finished")
    async with AsyncClient(url, prefix=rig.prefix) as client:
        for number in range(6):
            handle = await client.submit(f"text {number}")
            assert (await handle.result(timeout_s=5)).choices[0].text == f"text {number}"


@pytest.mark.parametrize("by", ["a node", "several"])
def test_the_command_too(cluster: Cluster, rig: Rig, call: Callable[..., Outcome], by: str) -> None:
    home = cluster.owner_of(rig.keys.jobs())
    away = cluster.nodes[(home + 1) % 3]
    url = away.url if by == "a node" else f"redis+cluster://127.0.0.1:1,127.0.0.1:{away.port}"
    rig.worker(script="echo", url=url)
    place = ["--redis-url", url, "--prefix", rig.prefix]
    for number in range(3):
        assert call("submit", f"text {number}", *place) == Outcome(0, f"text {number}\n", "")
    assert "running" in call("status", *place).out
    rig.add("bad", "{")
    rig.wait_done("bad")
    rig.wait_empty()
    assert "bad" in call("dead", "ls", *place).out
    assert call("dead", "purge", "--all", "--yes", *place).code == 0


def test_what_is_no_cluster(rig: Rig, own_server: Callable[..., Server], call: Callable[..., Outcome]) -> None:
    server = own_server()
    url = f"redis+cluster://127.0.0.1:{server.port}"
    with pytest.raises(ServerUnavailableError, match="cluster support disabled"):
        rig.worker(url=url)
    with Client(url) as client, pytest.raises(ServerError, match=r"[Cc]luster"):
        client.submit("Hello")
    with pytest.raises(ServerUnavailableError, match=r"no server at .*127\.0\.0\.1:1"):
        rig.worker(url="redis+cluster://127.0.0.1:1,127.0.0.1:1")
    refused = call("status", "--redis-url", "redis+cluster://127.0.0.1:1,127.0.0.1:1")
    assert refused.code == 3
    assert "127.0.0.1:1" in refused.line


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = start_cluster(tmp_path, replicas=True, node_timeout_ms=1000)
    yield made
    made.stop()


def test_a_node_dies_and_its_replica_takes_over(own_cluster: Cluster) -> None:
    """Where the queue is, and an answer. Until then the whole Cluster is down: everybody waits."""
    keys = Keys("own", "default")
    home = own_cluster.owner_of(keys.jobs())
    request_id = next(each for each in map(str, range(99)) if own_cluster.owner_of(keys.out(each)) == home)
    rig = Rig(own_cluster, "own", own_cluster.client())  # type: ignore[arg-type]
    worker = rig.worker(step_time_s=0.02, url=own_cluster.whole_url)
    try:
        with Client(own_cluster.whole_url, prefix="own", policy=Policy(give_up_s=20)) as client:
            handle = client.submit("Hello", id=request_id, max_tokens=60, ignore_eos=True)
            with handle.stream(timeout_s=20) as stream:
                events = [next(stream) for _ in range(5)]
                own_cluster.nodes[home].kill()
                away = next(each for each in map(str, range(99)) if slot_of(keys.out(each)) // 5461 != home)
                other = client.submit("Hello", id=away, max_tokens=5, ignore_eos=True)
                events += list(stream)
            assert sum(len(getattr(event, "token_ids", ())) for event in events) == 60
            assert len(other.result(timeout_s=5).choices[0].token_ids) == 5
        assert worker.counters.attempts == 2
        rig.client.close()
        rig.client = own_cluster.client()
        rig.submitted += [request_id, away]
    finally:
        rig.close()


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


class Racing(redis.RedisCluster):
    """Meets its own map changed by another thread, as redis-py 8.1 does now and then in a failover."""

    num_races = 0

    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        if self.num_races and args[0] not in {"CLUSTER SLOTS", "INFO"}:
            self.num_races -= 1
            raise RuntimeError("dictionary keys changed during iteration")
        return super().execute_command(*args, **kwargs)


def test_the_client_outlives_another_threads_change_of_its_map(cluster: Cluster, rig: Rig) -> None:
    rig.worker(script="echo")
    with Racing.from_url(cluster.url) as own, Client(own, prefix=rig.prefix) as client:
        own.num_races = 2
        handle = client.submit("text")
        own.num_races = 2
        assert handle.result(timeout_s=10).choices[0].text == "text"
        assert own.num_races == 0


def test_an_idle_worker_waits_where_the_queue_is(cluster: Cluster, rig: Rig) -> None:
    for node in cluster.nodes:
        raw(node, "CONFIG", "RESETSTAT")
    rig.worker()

    def of_blocking_reads(node: Server) -> dict[str, Any]:
        with node.client() as client:
            return client.info("commandstats").get("cmdstat_xreadgroup", {})

    wait_until(lambda: any(of_blocking_reads(node) for node in cluster.nodes))
    [stats] = [found for node in cluster.nodes if (found := of_blocking_reads(node))]
    assert stats["rejected_calls"] == 0


def test_a_step_is_one_pipeline_for_each_node(cluster: Cluster, rig: Rig) -> None:
    """Sixty answers grow by a token with each step: each node is sent its twenty or so at once."""
    worker = rig.worker(max_num_seqs=60, step_time_s=0.05, take_limit=60)
    for number in range(60):
        rig.add(f"my-{number}", {**JOB, "max_tokens": 60})
    wait_until(lambda: all(rig.num_tokens(each) > 2 for each in rig.submitted))
    before = [_work_of(node) for node in cluster.nodes]
    wait_until(lambda: worker.counters.tokens > 60 * 40)
    after = [_work_of(node) for node in cluster.nodes]
    for (commands, reads), (commands_before, reads_before) in zip(after, before, strict=True):
        assert (commands - commands_before) / (reads - reads_before) > 5
    rig.wait_done(*rig.submitted)


def _work_of(node: Server) -> tuple[int, int]:
    """How many scripts a node has run so far, and how often it has read from any of its connections."""
    with node.client() as client:
        scripts = client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})
        return int(scripts["calls"]), int(client.info("stats")["total_reads_processed"])


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
