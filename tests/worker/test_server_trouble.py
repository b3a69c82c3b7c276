"""What operators and failures do to a server while workers run."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from headrace.clients import Client
from headrace.clients.events import Finished, Started
from tests.support.proxy import Proxy
from tests.support.rig import MODEL, Rig, abandon
from tests.support.server import Server
from tests.support.worker_process import wait_until

JOB = {"prompt": "Hello", "max_tokens": 30, "seed": 3, "ignore_eos": True}


def test_the_group_destroyed_while_idle(rig: Rig) -> None:
    """Jobs added before the worker notices are not skipped: the group is made anew at the beginning."""
    rig.worker()
    rig.add("before", JOB)
    rig.wait_done("before")
    rig.wait_empty()
    rig.client.xgroup_destroy(rig.keys.jobs(), "workers")
    for number in range(3):
        rig.add(f"my-{number}", JOB)
    rig.wait_done(*rig.submitted, timeout_s=4)


def test_the_group_destroyed_while_a_request_runs(rig: Rig) -> None:
    worker = rig.worker(step_time_s=0.02, lease_s=1.0)
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 3)
    rig.client.xgroup_destroy(rig.keys.jobs(), "workers")
    rig.wait_done("my-1")
    rig.wait_empty()
    assert rig.num_tokens("my-1") == 60
    assert worker.is_alive


def test_the_group_made_anew_while_a_request_runs(rig: Rig) -> None:
    """The worker is given the entry a second time, while it runs it: that is no second request."""
    worker = rig.worker(step_time_s=0.02, lease_s=30.0)
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 3)
    pipeline = rig.client.pipeline(transaction=True)
    pipeline.xgroup_destroy(rig.keys.jobs(), "workers")
    pipeline.xgroup_create(rig.keys.jobs(), "workers", "0")
    pipeline.execute()
    rig.wait_done("my-1")
    rig.wait_empty()
    assert worker.counters.attempts == 1
    assert len(rig.started("my-1")) == 1


def test_everything_flushed_while_idle_and_while_running(
    own_server: Callable[..., Server], rig_on: Callable[..., Rig]
) -> None:
    rig = rig_on(own_server())
    rig.worker(step_time_s=0.02)
    rig.add("idle", JOB)
    rig.wait_done("idle")
    rig.client.flushall()
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 3)
    rig.client.flushall()
    rig.wait_done("my-1")  # there was no stream at begin: it is written again, from `started`
    assert rig.num_tokens("my-1") == 60
    rig.add("after", JOB)
    rig.wait_done("after")


def test_a_stream_deleted_that_was_there_at_begin_is_gone(rig: Rig) -> None:
    payload = json.dumps({**JOB, "max_tokens": 300}).encode()
    out, fp = rig.keys.out("my-1"), hashlib.sha256(payload).hexdigest()
    rig.client.xadd(out, {"json": json.dumps({"e": "queued", "fp": fp})}, id=f"0-{int(time.time() * 1000)}")
    rig.client.pexpire(out, 86_400_000)
    worker = rig.worker(step_time_s=0.01)
    rig.add("my-1", payload, fields={"fp": fp})
    rig.wait_tokens("my-1", 3)
    rig.client.delete(out)
    rig.wait_empty()
    assert worker.counters.gone == 1
    assert not rig.client.exists(out)
    wait_until(lambda: not worker.engine.has_work)


def test_scripts_flushed(rig: Rig) -> None:
    worker = rig.worker(step_time_s=0.01, lease_s=1.0)
    rig.add("my-1", {**JOB, "max_tokens": 80})
    for _ in range(5):
        time.sleep(0.1)
        rig.client.script_flush()
    rig.wait_done("my-1")
    rig.add("my-2", JOB)
    rig.wait_done("my-2")
    assert worker.counters.reconnects == 0


def test_all_connections_killed_five_times(rig: Rig) -> None:
    rig.worker(step_time_s=0.01)
    rig.add("my-1", {**JOB, "max_tokens": 100})
    for _ in range(5):
        time.sleep(0.15)
        rig.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    rig.add("my-2", JOB)
    rig.wait_done("my-1", "my-2", timeout_s=5)


def test_the_server_restarted_from_its_file(own_server: Callable[..., Server], rig_on: Callable[..., Rig]) -> None:
    server = own_server("--appendfsync", "always", appendonly=True)
    rig = rig_on(server)
    rig.worker(step_time_s=0.02, lease_s=5.0)
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 5)
    server.kill()
    time.sleep(0.3)
    server.restart()
    rig.client = server.client()
    rig.wait_done("my-1")
    assert len(rig.started("my-1")) == 1
    assert rig.num_tokens("my-1") == 60
    rig.add("after", JOB)
    rig.wait_done("after")


def test_the_server_restarted_empty(own_server: Callable[..., Server], rig_on: Callable[..., Rig]) -> None:
    """Without a file everything is lost; the running worker writes its stream again, from `started`, the same bytes."""
    server = own_server("--save", "")
    rig = rig_on(server)
    rig.worker(step_time_s=0.02, lease_s=30.0)  # a renewal before the end would find no entry to renew
    rig.add("my-1", {**JOB, "max_tokens": 40})
    rig.wait_tokens("my-1", 5)
    before = rig.raw("my-1")
    server.kill()
    server.restart()
    rig.client = server.client()
    rig.wait_done("my-1")
    assert rig.raw("my-1")[: len(before)] == before


@pytest.mark.parametrize("read_back", [False, True], ids=["added bare", "submitted"])
def test_the_server_comes_back_with_jobs_whose_answers_are_kept(
    own_server: Callable[..., Server], rig_on: Callable[..., Rig], read_back: bool
) -> None:
    """Its file is older than the answers: they are written again, and not begun anew with another seed."""
    server = own_server("--save", "3600 1000000")
    rig = rig_on(server)
    names = [f"my-{number}" for number in range(20)]
    options = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0}
    with Client(server.url, prefix=rig.prefix) as client:
        for name in names:
            if read_back:
                client.submit("Hello", id=name, **options)
                rig.submitted.append(name)
            else:
                rig.add(name, {"prompt": "Hello", **options})
    rig.client.save()
    rig.worker(lease_s=20.0)
    rig.wait_done(*names)
    before = {name: rig.raw(name) for name in names}
    for _ in range(2):
        server.kill()
        server.restart()
        rig.client = server.client()
        rig.wait_done(*names)
        rig.wait_empty()
        assert {name: rig.raw(name) for name in names} == before


@pytest.mark.parametrize("away_s", [0.0, 1.5], ids=["at once", "away for longer than a lease"])
def test_the_end_of_a_stream_lost_after_the_request_ended(
    own_server: Callable[..., Server], rig_on: Callable[..., Rig], proxy_to: Callable[..., Proxy], away_s: float
) -> None:
    """A failover takes the end of a finished stream back: it is sent again with the new connection."""
    server = own_server()
    rig, proxy = rig_on(server), proxy_to(server)
    rig.worker(lease_s=1.0, url=proxy.url)
    rig.add("my-1", JOB)
    rig.wait_done("my-1")
    rig.wait_empty()
    proxy.refuse()
    time.sleep(away_s)
    whole = rig.raw("my-1")
    rig.client.xdel(rig.keys.out("my-1"), *[entry_id for entry_id, _ in whole[-3:]])
    # XDEL keeps the stream's last id, as no failover does: make the stream anew up to where a replica would be
    rig.client.delete(rig.keys.out("my-1"))
    for entry_id, fields in whole[:-3]:
        rig.client.xadd(rig.keys.out("my-1"), fields, id=entry_id)
    rig.client.pexpire(rig.keys.out("my-1"), 600_000)
    proxy.accept()
    wait_until(lambda: rig.is_done("my-1"), 5)
    assert rig.raw("my-1") == whole


def test_a_frozen_server(own_server: Callable[..., Server], rig_on: Callable[..., Rig]) -> None:
    """Connections stay open and nothing answers, for longer than the socket's patience and the lease."""
    server = own_server()
    rig = rig_on(server)
    rig.worker(step_time_s=0.02, lease_s=0.9, socket_timeout_s=0.4)
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 5)
    server.freeze()
    time.sleep(1.5)
    server.thaw()
    rig.wait_done("my-1")
    assert rig.num_tokens("my-1") == 60


def test_out_of_memory_pauses_and_goes_on(own_server: Callable[..., Server], rig_on: Callable[..., Rig]) -> None:
    server = own_server("--maxmemory-policy", "noeviction")
    rig = rig_on(server)
    worker = rig.worker(step_time_s=0.01)
    rig.add("my-1", {**JOB, "max_tokens": 100})
    rig.wait_tokens("my-1", 5)
    rig.client.config_set("maxmemory", "1mb")
    wait_until(lambda: worker.service.loop._outbox.out_of_memory)
    time.sleep(0.3)
    steps = worker.engine.step_count
    time.sleep(0.3)
    assert worker.engine.step_count <= steps + 1  # nothing is computed that cannot be told
    assert rig.num_tokens("my-1") < 100
    rig.client.config_set("maxmemory", "0")
    rig.wait_done("my-1")
    assert rig.num_tokens("my-1") == 100
    assert worker.counters.attempts == 1
    rig.add("after", JOB)
    rig.wait_done("after")


def test_nothing_is_taken_while_the_server_is_out_of_memory(
    own_server: Callable[..., Server], rig_on: Callable[..., Rig]
) -> None:
    rig = rig_on(own_server())
    worker = rig.worker()
    for number in range(20):
        rig.add(f"my-{number}", JOB)
        if number == 5:
            rig.client.config_set("maxmemory", "1mb")
            break
    for number in range(6, 12):
        rig.submitted.append(f"my-{number}")
    wait_until(lambda: worker.service.loop._outbox.out_of_memory or rig.num_jobs() == 0, 3)
    rig.client.config_set("maxmemory", "0")
    for number in range(6, 12):
        rig.client.xadd(rig.keys.jobs(), {"id": f"my-{number}", "json": json.dumps(JOB)})
    rig.wait_done(*rig.submitted)


def test_a_server_that_becomes_a_replica_and_a_primary_again(
    own_server: Callable[..., Server], rig_on: Callable[..., Rig]
) -> None:
    rig = rig_on(own_server())
    rig.worker(step_time_s=0.02)
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 3)
    rig.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    time.sleep(0.4)
    rig.client.execute_command("REPLICAOF", "NO", "ONE")
    rig.wait_done("my-1")
    assert rig.num_tokens("my-1") == 60


def test_a_pending_entry_that_was_deleted(rig: Rig) -> None:
    entry_id = abandon(rig, "my-1")
    rig.client.xdel(rig.keys.jobs(), entry_id)
    rig.submitted.clear()
    rig.worker(lease_s=0.5)
    rig.add("good", JOB)
    rig.wait_done("good")
    wait_until(lambda: not rig.pending())


def test_an_own_pending_entry_that_was_deleted(rig: Rig) -> None:
    """Delivered to this worker, the reply lost, then deleted: it leaves the pending list."""
    worker = rig.worker(lease_s=1.0)
    rig.client.xadd(rig.keys.jobs("low"), {"id": "x", "json": "{}"}, id="5-5")
    wait_until(lambda: rig.is_done("x"))
    wait_until(lambda: not rig.pending("low"))
    # put an entry into its pending list behind its back
    rig.client.execute_command("XGROUP", "SETID", rig.keys.jobs("low"), "workers", "$")
    entry_id = rig.client.xadd(rig.keys.jobs("low"), {"id": "y", "json": "{}"})
    rig.client.xclaim(rig.keys.jobs("low"), "workers", worker.name, 0, [entry_id], force=True, justid=True)
    rig.client.xdel(rig.keys.jobs("low"), entry_id)
    wait_until(lambda: not rig.pending("low"), 5)
    assert worker.is_alive


def test_a_key_of_another_type_where_the_stream_should_be(rig: Rig) -> None:
    """The request cannot be told anything: it is left pending, said aloud, and others go on."""
    rig.client.set(rig.keys.out("bad"), "no stream", px=86_400_000)
    worker = rig.worker(lease_s=1.0)
    rig.add("bad", JOB)
    rig.add("good", JOB)
    rig.wait_done("good")
    wait_until(lambda: worker.counters.broken >= 1)
    assert any(level == "error" and fields.get("request") == "bad" for level, _, fields in worker.log.lines)
    time.sleep(0.3)
    assert worker.counters.broken <= 2  # no tight loop
    rig.client.delete(rig.keys.out("bad"))
    rig.wait_done("bad")


def test_a_dead_letter_key_of_another_type(rig: Rig) -> None:
    rig.client.set(rig.keys.dead, "no stream")
    worker = rig.worker(lease_s=1.0)
    rig.add("bad", "{")
    rig.add("good", JOB)
    rig.wait_done("good", "bad")
    wait_until(lambda: any(event == "cannot be acknowledged" for _, event, _ in worker.log.lines))
    wait_until(lambda: rig.num_jobs() == 1)
    rig.client.delete(rig.keys.dead)
    rig.wait_empty(5)
    assert len(rig.dead()) == 1


def test_garbage_in_a_requests_stream(rig: Rig) -> None:
    rig.client.xadd(rig.keys.out("bad"), {"what": "ever"}, id="5-5")
    rig.client.pexpire(rig.keys.out("bad"), 86_400_000)
    worker = rig.worker(lease_s=1.0)
    rig.add("bad", JOB)
    rig.add("good", JOB)
    rig.wait_done("good")
    wait_until(lambda: worker.counters.broken >= 1)
    rig.client.delete(rig.keys.out("bad"))
    rig.wait_done("bad")


def test_a_job_deleted_by_an_operator_while_it_runs(rig: Rig) -> None:
    """The lease shows that it is gone: the request is dropped."""
    worker = rig.worker(lease_s=0.9, step_time_s=0.02)
    rig.open_ids.add("my-1")
    rig.submitted.clear()
    entry_id = rig.client.xadd(rig.keys.jobs(), {"id": "my-1", "json": json.dumps({**JOB, "max_tokens": 500})})
    rig.wait_tokens("my-1", 2)
    rig.client.xdel(rig.keys.jobs(), entry_id)
    wait_until(lambda: worker.counters.lost_leases == 1)
    wait_until(lambda: not worker.engine.has_work)
    assert rig.pending() == []


# --- the same id more than once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_the_same_job_added_five_times_is_run_once(rig: Rig, workers: int) -> None:
    for _ in range(5):
        rig.add("my-1", JOB)
    started = [rig.worker(step_time_s=0.01) for _ in range(workers)]
    rig.wait_done("my-1")
    rig.wait_empty()
    assert len(rig.started("my-1")) == 1
    assert sum(worker.counters.attempts for worker in started) == 1


def test_a_duplicate_of_an_ended_request_is_acknowledged(rig: Rig) -> None:
    rig.worker()
    rig.add("my-1", JOB)
    rig.wait_done("my-1")
    before = rig.raw("my-1")
    rig.add("my-1", JOB)
    rig.wait_empty()
    assert rig.raw("my-1") == before


def test_a_duplicate_takes_over_when_the_first_entry_is_not_pending(rig: Rig) -> None:
    """The first entry is lost (its acknowledgement was never due): the second goes on with its tokens."""
    first = rig.worker(step_time_s=0.02, lease_s=0.9)
    entry_id = rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 5)
    rig.client.xack(rig.keys.jobs(), "workers", entry_id)
    rig.client.xdel(rig.keys.jobs(), entry_id)
    wait_until(lambda: first.counters.lost_leases == 1)
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_done("my-1")
    assert len(rig.started("my-1")) == 2
    assert rig.num_tokens("my-1") == 60


def test_another_payload_under_the_same_id_is_not_run(rig: Rig) -> None:
    worker = rig.worker()
    rig.add("my-1", JOB)
    rig.wait_done("my-1")
    before = rig.raw("my-1")
    rig.add("my-1", {**JOB, "prompt": "another"})
    rig.wait_empty()
    assert rig.raw("my-1") == before
    assert worker.counters.attempts == 1


def test_two_payloads_under_the_same_id_at_once(rig: Rig) -> None:
    rig.add("my-1", JOB)
    rig.add("my-1", {**JOB, "prompt": "another"})
    rig.worker(step_time_s=0.005)
    rig.wait_done("my-1")
    rig.wait_empty()
    assert len(rig.started("my-1")) == 1


def test_a_librarys_job_whose_stream_is_gone_is_acknowledged(rig: Rig) -> None:
    rig.worker()
    payload = json.dumps(JOB).encode()
    rig.add("my-1", payload, fields={"fp": hashlib.sha256(payload).hexdigest()})
    rig.wait_empty()
    assert rig.raw("my-1") == []


# --- other models -----------------------------------------------------------------------------------------------------


def test_a_request_begun_with_another_model_waits_for_a_worker_that_has_it(rig: Rig) -> None:
    other = replace(MODEL, fingerprint="e" * 64)
    first = rig.worker(step_time_s=0.02, drain_timeout_s=0.0, lease_s=30.0)
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 5)
    first.stop()
    before = rig.raw("my-1")
    second = rig.worker(model=other, lease_s=30.0)
    wait_until(lambda: second.counters.handed_back == 1)
    time.sleep(0.5)
    assert rig.raw("my-1") == before
    assert second.counters.handed_back == 1  # it does not pick it up again and again
    third = rig.worker(lease_s=30.0)
    rig.wait_done("my-1")
    assert rig.started("my-1")[-1].worker == third.name


def test_a_burst_does_not_wait_for_a_request_of_another_model(rig: Rig) -> None:
    first = rig.worker(step_time_s=0.02, drain_timeout_s=0.0, lease_s=30.0)
    rig.open_ids.add("my-1")
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 5)
    first.stop()
    burst = rig.worker(model=replace(MODEL, fingerprint="e" * 64), lease_s=30.0, burst=True)
    assert burst.wait(5) == 0
    assert rig.num_jobs() == 1


def test_after_the_grace_a_request_of_another_model_is_refused(rig: Rig) -> None:
    other = replace(MODEL, fingerprint="e" * 64)
    first = rig.worker(step_time_s=0.02, drain_timeout_s=0.0, lease_s=30.0)
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 5)
    first.stop()
    rig.worker(model=other, lease_s=30.0, foreign_model_grace_s=0.0)
    finished = rig.wait_done("my-1")
    assert finished.error is not None
    assert finished.error.code == "unsupported"
    rig.wait_empty()


# --- at the begin -----------------------------------------------------------------------------------------------------


def test_two_workers_begin_at_the_same_moment(rig: Rig) -> None:
    """The same entry, delivered to both (an operator's XCLAIM between take and begin): one attempt is told, whole."""
    barrier = threading.Barrier(2)
    for number in range(10):
        rig.add(f"my-{number}", JOB)
        rig.add(f"my-{number}", JOB, priority="high")
    del barrier
    workers = [rig.worker(max_num_seqs=4) for _ in range(2)]
    rig.wait_done(*rig.submitted)
    rig.wait_empty()
    for request_id in set(rig.submitted):
        kinds = [type(event) for event in rig.events(request_id)]
        assert kinds.count(Started) == 1
        assert kinds.count(Finished) == 1
    assert sum(worker.counters.attempts for worker in workers) == 10


def test_a_jobs_key_of_another_type_is_said_now_and_then_and_overcome(rig: Rig) -> None:
    """Whether it idles or has just been busy, the worker neither spins nor floods the log."""
    worker = rig.worker()
    rig.client.delete(rig.keys.jobs())
    rig.client.set(rig.keys.jobs(), "no stream")
    time.sleep(2.5)
    said = [event for level, event, _ in worker.log.lines if level == "error" and "cannot take" in event]
    assert 1 <= len(said) <= 4
    rig.client.delete(rig.keys.jobs())
    rig.add("my-1", JOB)
    rig.wait_done("my-1")


def test_a_jobs_key_of_another_type_does_not_flood_the_log_of_a_worker_that_runs(rig: Rig) -> None:
    """With every step it tried to make the group again, and said that it could not."""
    rig.client.hset(rig.keys.jobs("low"), "no", "stream")
    worker = rig.worker(step_time_s=0.005)
    rig.add("my-1", {**JOB, "max_tokens": 300})
    rig.wait_done("my-1")
    said = [event for level, event, _ in worker.log.lines if level == "error"]
    assert {"cannot create the group", "cannot take from a stream of jobs"} >= set(said)
    assert 1 <= len(said) <= 10
    rig.client.delete(rig.keys.jobs("low"))
    rig.add("my-2", JOB, priority="low")
    rig.wait_done("my-2")
