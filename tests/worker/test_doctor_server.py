"""`headrace doctor` finds faults of a server, each planted for real, and writes nothing while it looks."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace.clients import Client
from headrace.worker.doctor.checks import findings_of
from headrace.worker.doctor.look import Limits, look
from headrace.worker.doctor.seen import NodeSeen
from headrace.worker.exit_codes import ExitCode
from headrace.worker.rights import rights_of
from scripts.write_operations_tables import PAGE
from tests.support.command import ENVIRONMENT, PROGRAM, Outcome
from tests.support.morgue import PROMPT
from tests.support.patient import Patient
from tests.support.proxy import Proxy
from tests.support.rig import abandon
from tests.support.server import Server
from tests.support.worker_process import wait_until

JOB = {"prompt": "Hello", "max_tokens": 20, "seed": 3, "ignore_eos": True}
ROOT = Path(__file__).resolve().parents[2]
ALONE = {"no-worker"}  # what a queue without a worker always has


# --- faults -----------------------------------------------------------------------------------------------------------


def test_an_evicting_server(patient: Patient) -> None:
    with patient.configured("maxmemory-policy", "allkeys-lru"):
        diagnosis = patient.examine()
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.ERRORS_FOUND, ALONE | {"policy"})
    assert "CONFIG SET maxmemory-policy noeviction" in diagnosis.about("policy")["do"]


@pytest.mark.parametrize(("share", "severity"), [(0.85, "warning"), (0.95, "error")])
def test_a_server_whose_memory_is_nearly_full(patient: Patient, share: float, severity: str) -> None:
    used = patient.client.info("memory")["used_memory"]
    with patient.configured("maxmemory", int(used / share)):
        diagnosis = patient.examine()
    assert diagnosis.checks == ALONE | {"memory"}
    assert diagnosis.about("memory")["severity"] == severity


def test_a_server_without_a_limit(patient: Patient) -> None:
    with patient.configured("maxmemory", 0):
        assert patient.examine().checks == ALONE | {"maxmemory"}


def test_a_server_that_keeps_nothing(patient: Patient) -> None:
    with patient.configured("appendonly", "no"):
        assert patient.examine().checks == ALONE | {"append-only"}


def test_a_server_whose_last_snapshot_failed(patient: Patient) -> None:
    folder = patient.server._options.directory
    assert folder is not None
    (folder / "in-the-way" / "of-it").mkdir(parents=True, exist_ok=True)  # a file cannot take the name of a full folder
    with patient.configured("dbfilename", "in-the-way"):
        save(patient)
        diagnosis = patient.examine()
    save(patient)
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.ERRORS_FOUND, ALONE | {"save"})
    assert patient.examine().checks == ALONE


def save(patient: Patient) -> None:
    """Have the server try to write a snapshot, once it does nothing else of the kind."""

    def is_quiet() -> bool:
        info = patient.client.info("persistence")
        return not any(info[name] for name in ("rdb_bgsave_in_progress", "aof_rewrite_in_progress"))

    wait_until(is_quiet)
    patient.client.bgsave()
    wait_until(is_quiet)


def test_a_replica(patient: Patient) -> None:
    patient.client.replicaof("127.0.0.1", "1")
    try:
        diagnosis = patient.examine()
    finally:
        patient.client.replicaof("NO", "ONE")
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.ERRORS_FOUND, ALONE | {"replica"})
    assert diagnosis.about("replica")["do"] == "use redis://127.0.0.1:1"


def test_a_server_with_hardly_a_connection_left(patient: Patient) -> None:
    crowd = [patient.server.client() for _ in range(20)]
    for each in crowd:
        each.ping()
    used = patient.client.info("clients")["connected_clients"]
    with patient.configured("maxclients", used + 2):
        assert patient.examine().checks == ALONE | {"connections"}
    for each in crowd:
        each.close()


def test_a_server_that_is_far_away(patient: Patient, proxy_to: Callable[..., Proxy]) -> None:
    proxy = proxy_to(patient.server)
    proxy.delay_s = 0.025
    diagnosis = patient.examine("--redis-url", proxy.url)
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.WARNINGS_FOUND, ALONE | {"latency"})


def test_single_slow_answers_are_named() -> None:
    def said(trips_ms: list[float]) -> str:
        node = NodeSeen("a", round_trips_s=tuple(each / 1000 for each in trips_ms))
        return " ".join(each.seen for each in findings_of(_seen(node)))

    assert said([0.2] * 20) == said([0.2] * 19 + [300.0]) == ""
    assert said([0.2, 150.0] + [0.2] * 17 + [300.0]).endswith("; no. 2 took 150 ms, no. 20 took 300 ms")


def _seen(node: NodeSeen) -> Any:
    from headrace.clients.keys import Keys
    from headrace.worker.doctor.seen import KeysSeen, Seen

    return Seen(Keys(), 30.0, 86400.0, "default", (node,), None, KeysSeen())


@pytest.mark.parametrize(("ahead_s", "words"), [(125.0, "125.0 s behind"), (-125.0, "125.0 s ahead of")])
def test_a_clock_that_differs(patient: Patient, ahead_s: float, words: str) -> None:
    """Of two clocks it does not matter which is moved: here it is this machine's."""
    limits = Limits(30.0, 86400.0, 100, 1.0)
    seen = look(patient.server.client(), patient.keys, limits, clock=lambda: time.time() + ahead_s)
    [finding] = [each for each in findings_of(seen) if each.check == "clock"]
    assert words in finding.seen


def test_a_server_that_is_too_old() -> None:
    node = NodeSeen("a", info={"redis_version": "6.2.14", "maxmemory": "1000000"})
    assert [(each.check, each.do) for each in findings_of(_seen(node))] == [("version", "use 7.0 or later")]


# --- no server --------------------------------------------------------------------------------------------------------


def test_no_server(call: Callable[..., Outcome]) -> None:
    found = call("doctor", "--json", "--redis-url", "redis://me:secret@127.0.0.1:1/0")
    assert [each["check"] for each in json.loads(found.out)["findings"]] == ["unreachable"]
    text = call("doctor", "--redis-url", "redis://me:secret@127.0.0.1:1/0")
    assert text.out.count("\n") == 2
    for outcome in (found, text):
        assert outcome.code == ExitCode.SERVER_UNAVAILABLE
        assert "secret" not in outcome.out + outcome.err


def test_a_server_that_hangs(call: Callable[..., Outcome], own_server: Callable[..., Server]) -> None:
    server = own_server()
    server.freeze()
    begun_s = time.monotonic()
    assert call("doctor", "--redis-url", server.url).code == ExitCode.SERVER_UNAVAILABLE
    assert time.monotonic() - begun_s < 8
    server.thaw()


# --- rights -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def url_of(patient: Patient) -> Callable[..., str]:
    """`url_of(*rules)`: the address with a user of these rights."""

    def make(*rules: str) -> str:
        patient.client.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">pass", *rules)
        return f"redis://limited:pass@127.0.0.1:{patient.server.port}/0"

    return make


def rules_of(patient: Patient, role: str) -> list[str]:
    """The rights that the doctor holds to be enough."""
    names = [f"+{right.name}" for right in rights_of(patient.keys, "nobody") if role in right.roles]
    return [f"~{patient.prefix}:*", "+client|setname", *names]  # the name is given on connecting


def test_rights_that_are_missing(patient: Patient, url_of: Callable[..., str]) -> None:
    rules = ("~*", "+@all", "-xack", "-xgroup|create", "-set")
    diagnosis = patient.examine("--redis-url", url_of(*rules))
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.ERRORS_FOUND, ALONE | {"rights"})
    seen = diagnosis.about("rights")["seen"]
    assert seen == "user limited lacks rights: +xgroup|create +xack to be a worker, +set to be a client"
    keys = patient.examine("--redis-url", url_of(f"~{patient.prefix}:{{default}}:*", "+@all"))
    assert f"~{patient.prefix}:req:* to be a worker, ~{patient.prefix}:req:* to be" in keys.about("rights")["seen"]


def test_a_clients_user_need_be_no_worker(patient: Patient, url_of: Callable[..., str]) -> None:
    diagnosis = patient.examine("--redis-url", url_of(*rules_of(patient, "client"), "+info"))
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.WARNINGS_FOUND, {"not-seen"})


def test_the_rights_that_are_asked_for_are_enough(patient: Patient, url_of: Callable[..., str]) -> None:
    """A worker and a client that have no others serve, cancel, give up and leave."""
    worker = patient.worker(url=url_of(*rules_of(patient, "worker")), janitor_every_s=0.01)
    patient.client.execute_command("ACL", "SETUSER", "asking", "reset", "on", ">pass", *rules_of(patient, "client"))
    with Client(f"redis://asking:pass@127.0.0.1:{patient.server.port}/0", prefix=patient.prefix) as client:
        assert client.submit("text").result(timeout_s=10).reason in {"stop", "length"}
        running = client.submit("text", max_tokens=400, id="running")
        patient.wait_tokens("running", 1)
        client.cancel("running")
        assert running.result(timeout_s=10).reason in {"cancelled", "stop", "length"}
    patient.add("bad", "{")
    patient.wait_done("bad")
    patient.wait_empty()
    assert worker.stop() == 0
    assert [line for line in worker.log.lines if line[0] == "error"] == []
    assert not patient.client.xinfo_consumers(patient.keys.jobs(), "workers")


def test_what_may_not_be_looked_at_is_told(patient: Patient, url_of: Callable[..., str]) -> None:
    diagnosis = patient.examine("--redis-url", url_of("~*", "+@all", "-info", "-scan", "-memory", "-xinfo"))
    told = " ".join(each["seen"] for each in diagnosis.document["findings"] if each["check"] == "not-seen")
    assert all(f"could not look at {what}" in told for what in ("what INFO tells", "the queue:", "the keys:"))
    patient.add("one", JOB)
    sizes = patient.examine("--redis-url", url_of("~*", "+@all", "-memory"))
    assert sizes.about("not-seen")["seen"].startswith("could not look at what MEMORY USAGE tells")


# --- what it does and shows -------------------------------------------------------------------------------------------


def test_nothing_is_written(patient: Patient) -> None:
    def changes() -> tuple[int, list[str]]:
        dump = [repr((key, patient.client.dump(key))) for key in sorted(patient.client.keys(f"{patient.prefix}:*"))]
        return patient.client.info("persistence")["rdb_changes_since_last_save"], dump

    abandon(patient, "one")
    patient.add("two", JOB, priority="low")
    patient.client.xadd(patient.keys.dead, {"id": "x"})
    patient.client.set(f"{patient.prefix}:mine", "x")
    before = changes()
    assert patient.examine().checks == {"no-worker", "abandoned", "dead-consumer", "dead-letters", "no-ttl"}
    assert changes() == before


def test_prompts_and_passwords_stay_out_of_it(patient: Patient, url_of: Callable[..., str]) -> None:
    patient.add("one", {"prompt": PROMPT})
    patient.client.xadd(patient.keys.dead, {"id": "x", "json": PROMPT, "reason": PROMPT})
    url = url_of("~*", "+@all", "-xack", "-set")
    for flags in ([], ["--json"]):
        outcome = patient.call("doctor", *patient.place, *flags, "--redis-url", url)
        assert outcome.code == ExitCode.ERRORS_FOUND
        assert PROMPT not in outcome.out + outcome.err and "pass" not in outcome.out + outcome.err


def test_the_number_of_keys_looked_at_is_bounded(patient: Patient) -> None:
    for first in range(0, 12_000, 1000):
        patient.client.mset({f"{patient.prefix}:req:{{{n}}}:out": "x" for n in range(first, first + 1000)})
    num_all = patient.client.dbsize()
    patient.client.config_resetstat()
    diagnosis = patient.examine("--max-keys", "1000")
    calls = {name: each["calls"] for name, each in patient.client.info("commandstats").items()}
    assert calls["cmdstat_scan"] == 2
    assert "cmdstat_keys" not in calls and calls["cmdstat_memory|usage"] < 200
    assert diagnosis.document["keys"] == {"all": num_all, "looked_at": 1000}
    [told] = diagnosis.document["not_looked_at"]
    assert told.startswith(f"all keys but 1,000 of {num_all:,}")
    [streams] = [row for row in diagnosis.document["memory"] if row["kind"] == "request streams"]
    assert streams["keys"] == pytest.approx(12_000, rel=0.25)
    patient.client.delete(*patient.client.scan_iter(f"{patient.prefix}:*", count=5000))


def test_the_time_for_keys_is_bounded(patient: Patient) -> None:
    patient.client.mset({f"{patient.prefix}:{n}": "x" for n in range(5000)})
    diagnosis = patient.examine("--max-time", "1ms")
    assert diagnosis.document["keys"]["looked_at"] < 5000
    patient.client.delete(*patient.client.scan_iter(f"{patient.prefix}:*", count=5000))


def test_a_database_of_its_own(patient: Patient) -> None:
    other = redis.Redis.from_url(f"redis://127.0.0.1:{patient.server.port}/3")
    other.set(f"{patient.prefix}:mine", "x")
    assert patient.examine("--redis-url", f"redis://127.0.0.1:{patient.server.port}/3").checks == ALONE | {"no-ttl"}
    assert patient.examine().checks == ALONE
    other.flushdb()


def test_a_picture_on_a_terminal(patient: Patient) -> None:
    patient.add("one", JOB)
    ours, theirs = pty.openpty()
    done = subprocess.run([*PROGRAM, "doctor", *patient.place], check=False, stdout=theirs, env=ENVIRONMENT, timeout=30)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == ExitCode.ERRORS_FOUND
    assert "\x1b[1;31merror" in shown and "█" in shown


def test_every_check_stands_on_the_page() -> None:
    folder = ROOT / "worker" / "doctor"
    sources = "".join((folder / name).read_text() for name in ("check_server.py", "check_queue.py"))
    names = set(re.findall(r"""yield \(?[a-z ]+\)?\(\s*"([a-z-]+)",""", sources))
    assert len(names) > 20
    rows = PAGE.read_text().partition("## headrace doctor")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", rows, re.MULTILINE)) == names
