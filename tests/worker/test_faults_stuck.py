"""A worker that gets nowhere says so and loses its jobs; one whose server has changed finds the new one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.clients import Client, Policy
from headrace.worker.exit_codes import ExitCode
from headrace.worker.status import WorkerStatus, read_status
from tests.support.command import Outcome
from tests.support.proxy import Proxy
from tests.support.rig import Rig, ThreadWorker
from tests.support.server import Server
from tests.support.worker_process import wait_until

JOB = {"prompt": "Hello", "max_tokens": 30, "seed": 3, "ignore_eos": True}


def status_of(rig: Rig, worker: ThreadWorker) -> WorkerStatus:
    return next(each for each in read_status(rig.client, rig.keys).workers if each.name == worker.name)


def health(rig: Rig, call: Callable[..., Outcome]) -> int:
    return call("health", "--redis-url", rig.server.url, "--prefix", rig.prefix, "--queue", rig.keys.queue).code


def test_an_admission_that_stands_still_shows_and_frees_its_jobs(rig: Rig, call: Callable[..., Outcome]) -> None:
    """Nothing runs, something waits, every block is free, and no step finishes: that is no healthy worker."""
    worker = rig.worker(lease_s=1.2, watchdog_s=0.5)
    rig.add("first", JOB)
    rig.wait_done("first")
    assert health(rig, call) == ExitCode.OK
    scheduler: Any = worker.engine._scheduler
    scheduler._admit = lambda *_: None
    rig.add("my-1", JOB)
    wait_until(lambda: status_of(rig, worker).state == "stuck")
    status = status_of(rig, worker)
    assert not status.is_healthy
    assert health(rig, call) == ExitCode.UNHEALTHY
    assert (status.fields["running"], status.fields["waiting"], status.pending) == ("0", "1", 1)
    assert status.fields["free_kv_blocks"] == status.fields["total_kv_blocks"]
    second = rig.worker(lease_s=1.2)
    rig.wait_done("my-1")
    assert rig.started("my-1")[-1].worker == second.name
    assert second.counters.recovered == 1
    del scheduler._admit
    wait_until(lambda: status_of(rig, worker).is_healthy)


def test_a_step_that_hangs_shows_in_the_workers_hash(rig: Rig) -> None:
    hang = threading.Event()
    go_on = threading.Event()

    def script(_: object) -> int:
        if hang.is_set():
            go_on.wait(10)
        return 97

    worker = rig.worker(script=script, step_time_s=0.01, lease_s=0.9, watchdog_s=0.3)
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 3)
    hang.set()
    wait_until(lambda: status_of(rig, worker).state == "stuck")
    step = status_of(rig, worker).fields["step"]
    leases = worker.service.context.leases
    rounds = leases.rounds
    idle_ms = rig.pending()[0]["time_since_delivered"]
    time.sleep(0.4)
    assert status_of(rig, worker).fields["step"] == step
    assert leases.rounds == rounds
    assert rig.pending()[0]["time_since_delivered"] >= idle_ms + 300  # nobody renews it
    hang.clear()
    go_on.set()
    wait_until(lambda: status_of(rig, worker).state == "running")
    rig.wait_done("my-1")
    assert rig.num_tokens("my-1") == 60


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_renewing_thread_that_dies_shows_and_its_jobs_go_to_another(rig: Rig, call: Callable[..., Outcome]) -> None:
    """The step loop goes on as if nothing had happened; what it gives must not be told any more."""
    worker = rig.worker(lease_s=0.9, step_time_s=0.02, socket_timeout_s=1.0)
    rig.add("my-1", {**JOB, "max_tokens": 150})
    rig.wait_tokens("my-1", 3)

    def dies(_stalled: bool) -> Any:
        raise MemoryError("no room for another line")

    worker.service._parts().leases._heartbeat = dies
    wait_until(lambda: not rig.client.exists(rig.keys.worker(worker.name)))
    assert health(rig, call) == ExitCode.UNHEALTHY
    second = rig.worker(lease_s=0.9, step_time_s=0.005)
    rig.wait_done("my-1")
    assert [each.worker for each in rig.started("my-1")] == [worker.name, second.name]
    assert rig.num_tokens("my-1") == 150
    assert rig.dead() == []


def test_a_failover_behind_connections_that_stay_open(
    own_server: Callable[..., Server], rig_on: Callable[..., Rig], proxy_to: Callable[..., Proxy]
) -> None:
    """The address leads to another node; the old one has become its replica and lets everybody stay connected."""
    old = own_server("--repl-diskless-sync-delay", "0")
    new = own_server("--replicaof", "127.0.0.1", str(old.port))
    rig, proxy = rig_on(old), proxy_to(old)
    new_client = new.client()
    wait_until(lambda: new_client.info("replication")["master_link_status"] == "up")
    worker = rig.worker(url=proxy.url, step_time_s=0.02, lease_s=20.0)
    with Client(proxy.url, prefix=rig.prefix, policy=Policy(give_up_s=8.0)) as client:
        handle = client.submit("Hello", id="my-1", max_tokens=100, seed=3, ignore_eos=True)
        rig.submitted.append("my-1")
        with handle.stream(timeout_s=10) as stream:
            next(stream)
            rig.wait_tokens("my-1", 10)
            wait_until(lambda: new_client.xlen(rig.keys.out("my-1")) > 5)
            proxy._target_port = new.port
            new_client.execute_command("REPLICAOF", "NO", "ONE")
            rig.client.execute_command("REPLICAOF", "127.0.0.1", str(new.port))
            rig.client = new_client
            rig.wait_done("my-1")
            told = [each for event in stream for each in getattr(event, "token_ids", ())]
        assert told == rig.told("my-1")[0].token_ids
        assert len(told) == 100
        begun_s = time.monotonic()
        after = client.submit("Hello", id="after", max_tokens=5, ignore_eos=True)
        rig.submitted.append("after")
        assert len(after.result(timeout_s=5).token_ids) == 5
        assert time.monotonic() - begun_s < 5
    assert len(rig.started("my-1")) == 1
    assert worker.counters.attempts == 2
    worker.stop()  # while its server can be reached
