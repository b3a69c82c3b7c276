"""`headrace status` and `health`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

from headrace.clients.keys import GROUP, Keys
from headrace.worker.exit_codes import ExitCode
from tests.support.command import Outcome, Scribe
from tests.support.server import Server


def test_status_of_a_queue_that_nobody_has_used(call: Callable[..., Outcome], place: list[str]) -> None:
    outcome = call("status", *place)
    assert outcome.code == 0
    assert "no worker" in outcome.out


def test_status_counts_what_waits_runs_and_is_dead(
    call: Callable[..., Outcome], place: list[str], scribe: Scribe, server: Server
) -> None:
    for number, priority in enumerate(["high", "normal", "normal", "low", "low", "low"]):
        call("submit", "p", "--detach", "--priority", priority, "--id", f"s-{number}", *place)
    scribe.take()
    client = server.client()
    client.hset(scribe.keys.worker("scribe"), mapping={"host": "h", "pid": "7", "model": "m", "state": "running"})
    client.pexpire(scribe.keys.worker("scribe"), 60000)
    client.xadd(scribe.keys.dead, {"id": "d"})
    client.xgroup_createconsumer(scribe.keys.jobs(), GROUP, "idle-and-gone")
    document = json.loads(call("status", "--json", *place).out)
    lines = {line["priority"]: (line["waiting"], line["taken"]) for line in document["lines"]}
    assert lines == {"high": (0, 1), "normal": (2, 0), "low": (3, 0)}
    assert document["dead"] == 1
    assert [(each["name"], each["state"], each["pending"]) for each in document["workers"]] == [
        ("scribe", "running", 1)
    ]
    text = call("status", *place).out
    assert f"{scribe.keys.queue} low" in text and "scribe" in text and "running" in text
    assert "\x1b" not in text
    client.delete(scribe.keys.worker("scribe"))
    [worker] = json.loads(call("status", "--json", *place).out)["workers"]
    assert worker["state"] == "gone"


def test_health_is_that_of_this_machines_worker(
    call: Callable[..., Outcome], place: list[str], scribe: Scribe, server: Server
) -> None:
    assert call("health", *place).code == ExitCode.UNHEALTHY
    client = server.client()
    client.xgroup_create(scribe.keys.jobs(), GROUP, "0", mkstream=True)
    client.xgroup_createconsumer(scribe.keys.jobs(), GROUP, "w1")
    hash_key = scribe.keys.worker("w1")
    client.hset(hash_key, mapping={"host": "another-machine", "state": "running"})
    client.pexpire(hash_key, 60000)
    assert call("health", *place).code == ExitCode.UNHEALTHY
    assert call("health", "--any-host", *place).code == 0
    client.hset(hash_key, "host", os.uname().nodename)
    assert call("health", *place).out == "healthy: w1 (running)\n"
    client.hset(hash_key, "state", "stuck")
    outcome = call("health", *place)
    assert outcome.code == ExitCode.UNHEALTHY
    assert "w1 (stuck)" in outcome.out
    client.hset(hash_key, "state", "running")
    client.pexpire(hash_key, 1)  # no further sign of life
    time.sleep(0.01)
    assert call("health", *place).code == ExitCode.UNHEALTHY


def test_status_of_a_queue_with_anybodys_and_many_consumers(
    call: Callable[..., Outcome], own_server: Callable[..., Server], keys: Keys
) -> None:
    client = own_server().client()
    place = ["--redis-url", f"redis://127.0.0.1:{client.get_connection_kwargs()['port']}", "--queue", keys.queue]
    place += ["--prefix", keys.prefix]
    client.xgroup_create(keys.jobs(), GROUP, "0", mkstream=True)
    client.xadd(keys.jobs(), {"id": "one"})
    client.xreadgroup(GROUP, b"no \xff worker", {keys.jobs(): ">"})
    for number in range(1000):
        client.xgroup_createconsumer(keys.jobs(), GROUP, f"crashed-{number}")
    reads = client.info("stats")["total_reads_processed"]
    outcome = call("status", "--json", *place)
    [worker] = json.loads(outcome.out)["workers"]
    assert (worker["name"], worker["state"], worker["pending"]) == ("no \ufffd worker", "gone", 1)
    assert client.info("stats")["total_reads_processed"] - reads < 100  # their hashes are asked for together
