"""A worker whose master is named by sentinels: it follows when another server becomes the master."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.clients import AsyncClient, Client
from headrace.clients.keys import Keys
from headrace.worker.errors import ServerUnavailableError
from headrace.worker.links import open_link
from tests.support.command import Outcome
from tests.support.proxy import Proxy
from tests.support.rig import Rig
from tests.support.sentinel import SERVICE, SentinelGroup
from tests.support.server import binaries, free_port
from tests.support.worker_process import wait_until

JOB = {"prompt": "Hello", "max_tokens": 60, "seed": 3, "ignore_eos": True}


@pytest.fixture
def group(own_sentinels: Callable[..., SentinelGroup]) -> SentinelGroup:
    made = own_sentinels()
    made.wait_synced()
    return made


@pytest.fixture
def rig(group: SentinelGroup, prefix: str) -> Iterator[Rig]:
    """A queue on the group; the invariants are checked on the server that is the master in the end."""
    made = Rig(group, prefix, group.client())  # type: ignore[arg-type]
    yield made
    made.close()


def follow(rig: Rig, group: SentinelGroup) -> None:
    """Look at the present master from here on."""
    rig.client.close()
    rig.client = group.client()


async def test_worker_command_and_clients_by_one_address(
    group: SentinelGroup, rig: Rig, call: Callable[..., Outcome]
) -> None:
    rig.worker(script="echo")
    place = ["--redis-url", group.url, "--prefix", rig.prefix]
    assert call("submit", "Hello", *place) == Outcome(0, "Hello\n", "")
    assert "running" in call("status", *place).out
    assert call("dead", "ls", *place).code == 0
    assert f"127.0.0.1:{rig.client.connection_pool.connection_kwargs['port']} " in call("doctor", *place).out
    unknown = call("status", "--redis-url", group.url.replace(f"/{SERVICE}", "/another"))
    assert unknown.code == 3
    assert "no sentinel knows a service another" in unknown.line
    with Client(group.url, prefix=rig.prefix) as client:
        assert client.submit("Hello").result(timeout_s=5).choices[0].text == "Hello"
    async with AsyncClient(group.url, prefix=rig.prefix) as client:
        handle = await client.submit("World")
        assert (await handle.result(timeout_s=5)).choices[0].text == "World"


@pytest.mark.parametrize("binary", binaries())
async def test_the_master_dies_while_a_request_runs(
    own_sentinels: Callable[..., SentinelGroup], prefix: str, binary: Path | None
) -> None:
    """Readers notice nothing but a pause; what comes next is on the promoted server."""
    group = own_sentinels(binary=binary)
    group.wait_synced()
    rig = Rig(group, prefix, group.client())  # type: ignore[arg-type]
    worker = rig.worker(step_time_s=0.02)
    try:
        with Client(group.url, prefix=prefix) as client:
            async with AsyncClient(group.url, prefix=prefix) as other:
                handle = client.submit("Hello", id="my-1", max_tokens=60, ignore_eos=True)
                async with other.stream("my-1", timeout_s=15) as also:
                    stream = handle.stream(timeout_s=15)
                    events = [next(stream) for _ in range(6)]
                    seen = [await anext(also) for _ in range(6)]
                    old = group.master
                    old.kill()
                    events += list(stream)
                    seen += [event async for event in also]
                assert seen == events
                assert sum(len(getattr(event, "token_ids", ())) for event in events) == 60
                assert group.master_port() != old.port
                last = await other.submit("after", max_tokens=3, ignore_eos=True)
                assert (await last.result(timeout_s=5)).choices[0].text
            assert client.submit("after", max_tokens=3, ignore_eos=True).result(timeout_s=5).choices[0].text
        follow(rig, group)
        rig.submitted.append("my-1")
        rig.wait_done("my-1")
        assert len(rig.started("my-1")) == 1
        assert worker.counters.attempts == 3
    finally:
        rig.close()


def test_promoted_while_the_old_master_lives(group: SentinelGroup, rig: Rig) -> None:
    """It takes writes for another ten seconds; the worker is gone from it within two."""
    worker = rig.worker(step_time_s=0.02)
    rig.add("before", {**JOB, "max_tokens": 5})
    rig.wait_done("before")
    rig.add("my-1", {**JOB, "max_tokens": 120})
    rig.wait_tokens("my-1", 3)
    old = group.master
    group.fail_over()
    since_s = time.monotonic()
    with old.client() as client:
        assert client.execute_command("ROLE")[0] == b"master"
    follow(rig, group)
    wait_until(lambda: worker.service.links.writing.node[1] == group.master_port(), 5)
    assert time.monotonic() - since_s < 4
    rig.wait_done("my-1")
    assert rig.num_tokens("my-1") == 120
    assert len(rig.started("my-1")) == 1
    rig.wait_empty()
    rig.add("after", {**JOB, "max_tokens": 5})
    rig.wait_done("after", timeout_s=5)


def test_an_old_master_that_its_replicas_have_left_is_left_by_clients_too(
    own_sentinels: Callable[..., SentinelGroup], prefix: str
) -> None:
    """With `min-replicas-to-write` it refuses (NOREPLICAS): a job goes to the new master, not into the void."""
    group = own_sentinels(num_replicas=2, server_args=("--min-replicas-to-write", "1"))
    group.wait_synced()
    rig = Rig(group, prefix, group.client())  # type: ignore[arg-type]
    rig.worker(script="echo")
    with Client(group.url, prefix=prefix) as client:
        assert client.submit("before").result(timeout_s=5).choices[0].text == "before"
        old = group.master
        group.fail_over()
        with old.client() as raw:
            wait_until(lambda: raw.info("replication")["connected_slaves"] == 0)
            assert raw.execute_command("ROLE")[0] == b"master"
            since_s = time.monotonic()
            assert client.submit("after", id="after").result(timeout_s=5).choices[0].text == "after"
            assert time.monotonic() - since_s < 5
            assert raw.execute_command("ROLE")[0] == b"master"
            assert not raw.exists(rig.keys.out("after"))
    follow(rig, group)
    rig.submitted.append("after")
    rig.close()


def test_a_replica_promoted_without_the_end_of_its_streams(
    group: SentinelGroup, rig: Rig, proxy_to: Callable[..., Proxy]
) -> None:
    """Of one request that has ended, of one that runs, and of one that it never heard of."""
    master, replica = group.servers
    proxy = proxy_to(master)
    with replica.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", proxy.port)
        wait_until(lambda: client.info("replication")["master_link_status"] == "up")
    worker = rig.worker(step_time_s=0.02, lease_s=20.0)
    rig.add("running", {**JOB, "max_tokens": 120})
    rig.add("ending", {**JOB, "max_tokens": 40})
    rig.wait_tokens("ending", 10)
    with master.client() as client:
        assert client.execute_command("WAIT", 1, 5000) == 1
    proxy.hold()
    rig.wait_done("ending")
    rig.wait_tokens("running", 60)
    seen = {name: rig.raw(name) for name in ("running", "ending")}
    master.kill()
    proxy.close()  # with all that it held back
    group.wait_for_another(master.port)
    follow(rig, group)
    wait_until(lambda: rig.is_done("ending") and rig.num_tokens("running") > 60)
    assert rig.raw("ending") == seen["ending"]
    assert rig.raw("running")[: len(seen["running"])] == seen["running"]
    rig.wait_done("running")
    rig.wait_empty()
    assert worker.counters.attempts == 2


# --- what it says when no master is to be found -----------------------------------------------------------------------


def refusal(url: str) -> str:
    with pytest.raises(ServerUnavailableError) as caught:
        open_link(url, 5.0, "test", Keys("headrace", "default"))
    return str(caught.value)


@pytest.fixture
def lone(own_sentinels: Callable[..., SentinelGroup]) -> SentinelGroup:
    """One server, one sentinel."""
    return own_sentinels(num_replicas=0, num_sentinels=1)


def test_no_sentinel_answers() -> None:
    port = free_port()
    url = f"redis+sentinel://user:hush@127.0.0.1:{port},127.0.0.1:{port}/main?sentinel_password=hush"
    said = refusal(url)
    assert f"no server at redis+sentinel://user:***@127.0.0.1:{port},127.0.0.1:{port}/main" in said
    assert "no sentinel answers: 127.0.0.1" in said
    assert "refused" in said
    assert "hush" not in said


def test_a_service_that_sentinels_do_not_know(lone: SentinelGroup) -> None:
    said = refusal(lone.url.replace(f"/{SERVICE}", "/another"))
    assert "no sentinel knows a service another" in said
    assert f"knows only {SERVICE}" in said


def test_a_master_that_is_down(lone: SentinelGroup) -> None:
    lone.servers[0].kill()
    wait_until(lambda: b"s_down" in b",".join(lone.sentinels[0].ask("SENTINEL", "MASTER", SERVICE)))
    said = refusal(lone.url)
    assert f"the master of service {SERVICE} is down" in said
    assert str(lone.servers[0].port) in said


def test_sentinels_that_name_a_replica(lone: SentinelGroup) -> None:
    """They may be behind: what they name is asked for its role."""
    with lone.servers[0].client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        assert "which is a slave" in refusal(lone.url)
        client.execute_command("REPLICAOF", "NO", "ONE")
    open_link(lone.url, 5.0, "test", Keys("headrace", "default")).close()


def test_passwords_of_servers_and_of_sentinels(own_sentinels: Callable[..., SentinelGroup]) -> None:
    more = (f"sentinel auth-pass {SERVICE} p@ss", "requirepass s/cret")
    lone = own_sentinels(num_replicas=0, num_sentinels=1, sentinel_lines=more)
    with lone.servers[0].client() as client:
        client.config_set("requirepass", "p@ss")
    host = f"127.0.0.1:{lone.sentinels[0].port}"
    assert "Authentication required" in refusal(f"redis+sentinel://:p%40ss@{host}/main")
    assert "invalid username-password pair" in refusal(f"redis+sentinel://:p@{host}/main?sentinel_password=s/cret")
    url = f"redis+sentinel://:p%40ss@{host}/main?sentinel_password=s/cret"
    open_link(url, 5.0, "test", Keys("headrace", "default")).close()
