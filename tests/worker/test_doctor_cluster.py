"""`headrace doctor` on a Redis Cluster: every master is looked at, and the queue on the one that has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.worker.exit_codes import ExitCode
from tests.support.cluster import Cluster, start_cluster
from tests.support.command import Outcome
from tests.support.rig import Rig
from tests.support.server import Server, free_port

JOB = {"prompt": "Hello", "max_tokens": 10, "seed": 3, "ignore_eos": True}


@pytest.mark.parametrize("seed_node", [0, 1])
def test_every_master_is_looked_at(cluster: Cluster, prefix: str, call: Callable[..., Outcome], seed_node: int) -> None:
    rig = Rig(cluster, prefix, cluster.client(), check_at_end=False)  # type: ignore[arg-type]
    nodes = [node.client() for node in cluster.nodes]

    def examine() -> tuple[int, dict[str, Any]]:
        outcome = call("doctor", "--json", "--redis-url", cluster.nodes[seed_node].url, "--prefix", prefix)
        return outcome.code, json.loads(outcome.out)

    for node in nodes:
        node.config_set("maxmemory", "256mb")
        node.config_set("appendonly", "yes")
    rig.worker()
    for number in range(20):
        rig.add(f"my-{number}", JOB)
    rig.wait_done(*rig.submitted)
    rig.wait_empty()
    code, document = examine()
    assert (code, document["findings"], document["not_looked_at"]) == (0, [], [])
    assert [row["keys"] for row in document["memory"] if row["kind"] == "request streams"] == [20]
    assert len(document["servers"]) == 3 and document["queue"]["workers"][0]["state"] == "running"

    nodes[2].config_set("maxmemory-policy", "volatile-ttl")
    one = next(each for each in rig.submitted if cluster.owner_of(rig.keys.out(each)) == 1)
    nodes[1].persist(rig.keys.out(one))
    code, document = examine()
    nodes[2].config_set("maxmemory-policy", "noeviction")
    assert code == ExitCode.ERRORS_FOUND
    policy, lasting = document["findings"]
    assert policy["seen"].startswith(f"127.0.0.1:{cluster.nodes[2].port}: the server's maxmemory-policy is volatile")
    assert rig.keys.out(one) in lasting["seen"]
    rig.close()


def test_a_master_that_is_gone(tmp_path: Path, call: Callable[..., Outcome]) -> None:
    own = start_cluster(tmp_path)
    client = own.client()
    owner = own.owner_of("headrace:{default}:jobs")
    client.xadd("headrace:{default}:jobs", {"id": "x"})
    own.nodes[owner].kill()
    outcome = call("doctor", "--json", "--redis-url", own.nodes[owner - 1].url)
    findings = [each for each in json.loads(outcome.out)["findings"] if each["check"] in {"unreachable", "not-seen"}]
    assert outcome.code == ExitCode.ERRORS_FOUND
    assert f"127.0.0.1:{own.nodes[owner].port}: the server does not answer" in findings[0]["seen"]
    assert findings[1]["seen"] == "could not look at the queue: its node does not answer"
    for node in own.nodes:
        node.stop()


def test_a_cluster_without_slots(own_server: Callable[..., Server], call: Callable[..., Outcome]) -> None:
    server = own_server("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    outcome = call("doctor", "--json", "--redis-url", server.url)
    assert outcome.code == ExitCode.SERVER_UNAVAILABLE
    [finding] = json.loads(outcome.out)["findings"]
    assert finding["check"] == "unreachable"
    assert "the Cluster has no slots yet" in finding["seen"]
