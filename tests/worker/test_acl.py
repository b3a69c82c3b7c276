"""A worker's user: the rights of deploy/acl/worker.acl suffice, none is one too many, and one too few is named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from headrace.clients import Client
from headrace.clients.keys import Keys
from headrace.worker.errors import ServerUnavailableError
from headrace.worker.links import open_link
from tests.support.acl import commands_called, rights_in, set_user, url_of
from tests.support.cluster import Cluster
from tests.support.command import Outcome
from tests.support.rig import Rig, ThreadWorker, abandon
from tests.support.sentinel import SERVICE, SentinelGroup
from tests.support.server import Server, binaries, start_server
from tests.support.server_kinds import installed_redis
from tests.support.worker_process import wait_until

RIGHTS = rights_in("worker")
KEYS = Keys("headrace", "default")
JOB = {"prompt": "Hello", "max_tokens": 20, "seed": 3, "ignore_eos": True}
ONLY_AT_START = {"info"}


def all_that_a_worker_does(rig: Rig, worker: ThreadWorker) -> None:
    """Run, refuse, cancel, renew, recover, find what was lost, tidy up, connect anew, hand back, leave."""
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.add("cancelled", {**JOB, "max_tokens": 1000})
    rig.add("bad", "{")
    rig.wait_tokens("cancelled", 2)
    rig.client.set(rig.keys.cancel("cancelled"), "1", px=60_000)
    rig.wait_done("my-1", "cancelled", "bad")
    assert len(rig.dead()) == 1
    abandon(rig, "recovered", JOB)
    rig.wait_done("recovered")
    rig.client.execute_command("CLIENT", "KILL", "USER", "worker")
    entry_id = rig.add("lost", JOB, priority="low")
    rig.client.xclaim(rig.keys.jobs("low"), "workers", worker.name, 0, [entry_id], force=True, justid=True)
    rig.wait_done("lost")
    rig.add("handed", {**JOB, "max_tokens": 1000})
    rig.wait_tokens("handed", 2)
    assert worker.stop(2) == 0
    assert worker.name not in str(rig.client.xinfo_consumers(rig.keys.jobs(), "workers"))
    assert not rig.client.exists(rig.keys.worker(worker.name))
    assert all(rig.client.pttl(rig.keys.out(each)) > 0 for each in rig.submitted)
    rig.open_ids.add("handed")


@pytest.mark.parametrize("binary", binaries())
def test_they_suffice_and_none_is_one_too_many(
    own_server: Callable[..., Server], tmp_path: Path, binary: Path | None
) -> None:
    socket = tmp_path / "redis.sock"
    server = own_server("--unixsocket", str(socket), binary=binary)
    raw = redis.Redis(unix_socket_path=str(socket))
    set_user(raw, "worker", RIGHTS)
    rig = Rig(server, "headrace", raw)
    url = url_of("worker", server.port)
    worker = rig.worker(url=url, step_time_s=0.02, lease_s=1.0, janitor_every_s=0.2)
    with commands_called(raw) as called:  # not of the start, where each right is tried
        all_that_a_worker_does(rig, worker)
    granted = {word[1:] for word in RIGHTS if word.startswith("+")}
    assert called - {"auth"} == granted - ONLY_AT_START
    assert raw.acl_log() == []
    rig.close()


@pytest.fixture(scope="module", params=binaries())
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = start_server(tmp_path_factory.mktemp("acl"), binary=request.param)
    yield started
    started.stop()


def refusal(url: str) -> str:
    with pytest.raises(ServerUnavailableError) as caught:
        open_link(url, 5.0, "test", KEYS)
    return str(caught.value)


def test_each_that_is_missing_is_named_with_the_line_to_add(servers: Server) -> None:
    with servers.client() as raw:
        for missing in RIGHTS:
            set_user(raw, "worker", [right for right in RIGHTS if right != missing])
            said = refusal(url_of("worker", servers.port))
            assert said.endswith(f"missing {missing}; run ACL SETUSER worker {missing}"), said
            raw.execute_command("ACL", "SETUSER", "worker", missing)  # as it says
            open_link(url_of("worker", servers.port), 5.0, "test", KEYS).close()
        set_user(raw, "worker", [right for right in RIGHTS if right not in ("+xack", "+hset", RIGHTS[0])])
        assert refusal(url_of("worker", servers.port)).endswith(f"ACL SETUSER worker +xack +hset {RIGHTS[0]}")


def test_looking_has_no_effect(servers: Server) -> None:
    with servers.client() as raw:
        set_user(raw, "worker", RIGHTS)
        raw.flushall()
        open_link(url_of("worker", servers.port), 5.0, "test", KEYS).close()
        assert raw.keys("*") == []
        raw.xadd(KEYS.jobs(), {"id": "x"})
        raw.xgroup_create(KEYS.jobs(), "workers", "0")
        before = raw.dump(KEYS.jobs())
        open_link(url_of("worker", servers.port), 5.0, "test", KEYS).close()
        assert raw.dump(KEYS.jobs()) == before
        raw.flushall()


def test_the_command_says_it_before_it_loads_a_model(servers: Server, call: Callable[..., Outcome]) -> None:
    with servers.client() as raw:
        set_user(raw, "worker", [right for right in RIGHTS if right != "+xack"])
    outcome = call("worker", "--model", "demo", "--check", "--redis-url", url_of("worker", servers.port))
    assert outcome.code == 3
    assert "missing +xack; run ACL SETUSER worker +xack" in outcome.line
    assert "pw" not in outcome.line


@pytest.mark.parametrize("right", ["+xadd", "+xreadgroup", "~headrace:req:*"])
def test_a_right_taken_away_while_it_runs(
    own_server: Callable[..., Server], rig_on: Callable[..., Rig], right: str
) -> None:
    """It says so, loses nothing, and goes on when it is allowed again."""
    server = own_server()
    rig = rig_on(server)
    rights = [each.replace("headrace:", f"{rig.prefix}:") for each in RIGHTS]
    right = right.replace("headrace:", f"{rig.prefix}:")
    set_user(rig.client, "worker", rights)
    worker = rig.worker(url=url_of("worker", server.port), step_time_s=0.02, lease_s=1.5)
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 5)
    set_user(rig.client, "worker", [each for each in rights if each != right])
    rig.add("my-2", JOB)

    def alarms() -> list[str]:
        return [f"{event} {fields}" for level, event, fields in worker.log.lines if level == "error"]

    named = right[1:] if right[0] == "+" else "access"
    wait_until(lambda: any("forbids" in each and re.search(named, each) for each in alarms()), 5, "it says so")
    time.sleep(1.0)
    assert len([each for each in alarms() if "forbids" in each]) == 1  # not with every step
    set_user(rig.client, "worker", rights)
    rig.wait_done("my-1", "my-2")
    rig.wait_empty()
    assert rig.num_tokens("my-1") == 60
    assert rig.dead() == []


# --- what connecting takes in other places ----------------------------------------------------------------------------


def test_behind_sentinels_it_asks_for_the_role(own_sentinels: Callable[..., SentinelGroup]) -> None:
    group = own_sentinels(num_replicas=0, num_sentinels=1)
    url = group.url.replace("://", "://worker:pw@")
    with group.client() as raw:
        set_user(raw, "worker", RIGHTS)
        assert refusal(url).endswith("missing +role; run ACL SETUSER worker +role")
        raw.execute_command("ACL", "SETUSER", "worker", "+role")
        open_link(url, 5.0, SERVICE, KEYS).close()


def test_in_a_cluster_it_asks_for_the_slots(cluster: Cluster) -> None:
    url = url_of("worker", cluster.nodes[0].port)
    for node in cluster.nodes:
        with node.client() as raw:
            set_user(raw, "worker", RIGHTS)
    assert "cluster|slots" in refusal(url)
    for node in cluster.nodes:
        with node.client() as raw:
            raw.execute_command("ACL", "SETUSER", "worker", "+cluster|slots")
    open_link(url, 5.0, "test", KEYS).close()
    with cluster.nodes[2].client() as raw:  # one node of which the rights were forgotten
        set_user(raw, "worker", [right for right in RIGHTS if right != "+script|load"])
    assert "script|load" in refusal(url)


def test_another_database_is_selected(servers: Server) -> None:
    with servers.client() as raw:
        set_user(raw, "worker", RIGHTS)
        url = url_of("worker", servers.port).replace("/0", "/1")
        assert refusal(url).endswith("missing +select; run ACL SETUSER worker +select")
        raw.execute_command("ACL", "SETUSER", "worker", "+select")
        open_link(url, 5.0, "test", KEYS).close()


def test_the_whole_way_with_a_user_each(own_server: Callable[..., Server], rig_on: Callable[..., Rig]) -> None:
    """A producer, a reader and a worker, none of which may do what another does."""
    server = own_server(binary=installed_redis())
    rig = Rig(server, "headrace", server.client())
    for name in ("worker", "producer", "reader"):
        set_user(rig.client, name, rights_in(name))
    rig.worker(url=url_of("worker", server.port), script="echo")
    with Client(url_of("producer", server.port)) as producer, Client(url_of("reader", server.port)) as reader:
        handle = producer.submit("Hello")
        assert reader.result(handle.id, timeout_s=5).choices[0].text == "Hello"
        assert producer.cancel(handle.id) == "already finished"
    rig.close()
