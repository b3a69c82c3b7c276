"""Each "not now" of a server, made by a real one: worker and client both wait, nothing is lost and nothing twice.

`READONLY`, `OOM`, `MISCONF`, `NOREPLICAS`, `MASTERDOWN` and `BUSY` here, `LOADING` at the end; `NOGROUP` and `NOSCRIPT`
are in `test_server_trouble`, `CLUSTERDOWN` and `TRYAGAIN` in `test_cluster`.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from headrace.clients import Client, Policy
from headrace.clients.address import parse_address
from headrace.worker.connection import Link
from tests.support.rig import Rig
from tests.support.server import Server, binaries, free_port
from tests.support.worker_process import wait_until

TOKENS = {"max_tokens": 60, "seed": 3, "ignore_eos": True}


@dataclass(frozen=True)
class Trouble:
    """What to do to a server, and how it is mended."""

    code: str
    spoil: tuple[str, ...]
    mend: tuple[str, ...]
    before: tuple[str, ...] = ("PING",)  # so that it is this trouble
    answers_reads: bool = True


def _set(name: str, spoilt: str, mended: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ("CONFIG", "SET", name, spoilt), ("CONFIG", "SET", name, mended)


_DEMOTED = ("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")
_STALE = ("CONFIG", "SET", "replica-serve-stale-data", "no")
_IMPATIENT = ("CONFIG", "SET", "lua-time-limit", "1")

TROUBLES = [
    Trouble("READONLY", *_DEMOTED),
    Trouble("MASTERDOWN", *_DEMOTED, before=_STALE, answers_reads=False),
    Trouble("BUSY", ("EVAL", "while true do end", "0"), ("SCRIPT", "KILL"), before=_IMPATIENT, answers_reads=False),
    Trouble("OOM", *_set("maxmemory", "1", "0")),
    Trouble("NOREPLICAS", *_set("min-replicas-to-write", "1", "0")),
    # after a snapshot that failed, which `spoilt` sees to
    Trouble("MISCONF", *_set("stop-writes-on-bgsave-error", "yes", "no")),
]


def fail_a_snapshot(client: redis.Redis) -> None:
    """Take the server's folder away and have it write there. It says so from now on, if it is to."""
    client.config_set("stop-writes-on-bgsave-error", "no")
    client.config_set("save", "3600 1000000")
    shutil.rmtree(Path(client.config_get("dir")["dir"]))
    client.execute_command("BGSAVE")
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")


def spoil(rig: Rig, trouble: Trouble) -> None:
    """Make the trouble; not all of it is answered before it is over."""
    rig.client.execute_command(*trouble.before)
    connection = rig.client.connection_pool.make_connection()
    connection.send_command(*trouble.spoil)
    if trouble.code != "BUSY":
        connection.read_response()
        connection.disconnect()


@pytest.fixture
def client_of() -> Iterator[Callable[[Rig], Client]]:
    made: list[Client] = []

    def make(rig: Rig) -> Client:
        made.append(Client(rig.server.url, prefix=rig.prefix, policy=Policy(give_up_s=20)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda each: each.code)
@pytest.mark.parametrize("binary", binaries())
def test_both_sides_wait_until_it_passes(
    own_server: Callable[..., Server],
    rig_on: Callable[..., Rig],
    client_of: Callable[[Rig], Client],
    trouble: Trouble,
    binary: Path | None,
) -> None:
    rig = rig_on(own_server(binary=binary))
    if trouble.code == "MISCONF":
        fail_a_snapshot(rig.client)
    worker, client = rig.worker(step_time_s=0.01), client_of(rig)
    running = client.submit("Hello", id="my-1", **TOKENS)
    rig.wait_tokens("my-1", 5)
    spoil(rig, trouble)
    outbox, link = worker.service.loop._outbox, worker.service.links.writing
    wait_until(lambda: outbox.is_blocked or trouble.code in link.last_error, 5, "the worker notices")
    with ThreadPoolExecutor(1) as pool:
        submitted = pool.submit(client.submit, "World", id="my-2", **TOKENS)
        told = rig.num_tokens("my-1") if trouble.answers_reads else 0
        steps = worker.engine.step_count
        assert not submitted.done()
        rig.client.execute_command(*trouble.mend)
        assert told < 60
        assert steps < 60
        assert len(running.result(timeout_s=10).choices[0].token_ids) == 60
        assert len(submitted.result(10).result(timeout_s=10).choices[0].token_ids) == 60
    rig.submitted += ["my-1", "my-2"]
    rig.wait_empty()
    assert worker.counters.attempts == 2
    rig.client.config_set("save", "")  # it would try to write at its end, and stay


def test_an_idle_worker_at_a_server_that_is_demoted_for_a_while(
    own_server: Callable[..., Server], rig_on: Callable[..., Rig]
) -> None:
    """Its blocking read is ended by the server (UNBLOCKED, or the connection is closed)."""
    rig = rig_on(own_server())
    worker = rig.worker()
    generation = worker.service.links.waiting.generation
    rig.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    wait_until(lambda: "READONLY" in worker.service.links.writing.last_error)
    rig.client.execute_command("REPLICAOF", "NO", "ONE")
    rig.add("my-1", {"prompt": "x", "max_tokens": 3})
    rig.wait_done("my-1", timeout_s=5)
    assert worker.service.links.waiting.generation > generation
    assert [line for line in worker.log.lines if line[0] == "error"] == []


@pytest.mark.parametrize("binary", binaries()[:2])
def test_a_server_that_loads_its_file(
    own_server: Callable[..., Server],
    rig_on: Callable[..., Rig],
    client_of: Callable[[Rig], Client],
    binary: Path | None,
) -> None:
    """It takes connections and answers LOADING to everything, for a second and a half."""
    slow = ("--key-load-delay", "500", "--loading-process-events-interval-bytes", "1024", "--appendfsync", "always")
    server = own_server(*slow, binary=binary, appendonly=True)
    rig = rig_on(server)
    with rig.client.pipeline(transaction=False) as pipeline:
        for number in range(3000):
            pipeline.set(f"{rig.prefix}-ballast:{number}", "x" * 20, px=60_000)
        pipeline.execute()
    worker, client = rig.worker(step_time_s=0.02, lease_s=20.0), client_of(rig)
    running = client.submit("Hello", id="my-1", **TOKENS)
    stream = running.stream(timeout_s=20)
    events = [next(stream) for _ in range(4)]
    rig.client.execute_command("BGREWRITEAOF")
    wait_until(lambda: not rig.client.info("persistence")["aof_rewrite_in_progress"])
    server.kill()
    restarted = threading.Thread(target=server.restart)
    restarted.start()
    wait_until(lambda: "LOADING" in worker.service.links.writing.last_error, 10, "the worker is told")
    late = client.submit("World", id="my-2", **TOKENS)
    restarted.join()
    events += list(stream)
    assert sum(len(getattr(event, "token_ids", ())) for event in events) == 60
    assert len(late.result(timeout_s=10).choices[0].token_ids) == 60
    rig.client = server.client()
    rig.submitted += ["my-1", "my-2"]
    assert worker.counters.attempts == 2


def test_a_thousand_that_lost_their_server_do_not_come_back_at_once() -> None:
    links = [Link(parse_address(f"redis://127.0.0.1:{free_port()}"), 1.0, f"test-{number}") for number in range(100)]
    for _ in range(3):
        for link in links:
            link._next_try_s = 0.0
            assert not link.ensure()
    pauses = sorted(link._next_try_s - min(each._next_try_s for each in links) for link in links)
    whole = links[0]._pause_s
    assert len(set(pauses)) > 90
    assert pauses[-1] > whole / 4  # as wide as half of the pause, less the time that trying took
