"""Thousands of jobs later nothing has grown; and a hundred thousand pending entries cost the server a fixed share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from headrace.clients.keys import Keys
from tests.support.chaos_checker import require
from tests.support.chaos_queue import ChaosQueue
from tests.support.chaos_workers import Worker
from tests.support.server import Server
from tests.support.worker_process import wait_until

RESULT_TTL_S = 1.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def _run_jobs(queue: ChaosQueue, tag: str, number: int) -> None:
    """Short jobs, a few hundred at a time, run to their end and looked at."""
    for first in range(0, number, 500):
        names = [f"{tag}-{first + index}" for index in range(min(500, number - first))]
        pipeline = queue.raw.pipeline(transaction=False)
        for name in names:
            job = {"prompt": name, "seed": 1, "max_tokens": 3, "ignore_eos": True, "stop": ["END"]}
            queue.jobs[name] = job
            pipeline.xadd(queue.keys.jobs(), {"id": name, "json": json.dumps(job)})
        pipeline.execute()
        queue.wait_empty()


def _used_bytes(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def test_nothing_grows_with_the_number_of_jobs(
    own_server: Callable[..., Server],
    queue_on: Callable[[Server], ChaosQueue],
    spawn: Callable[..., Worker],
    is_full: bool,
    progress: Callable[[str], None],
) -> None:
    num_jobs = 10_000 if is_full else 1_000
    queue = queue_on(own_server())
    worker = spawn(queue, result_ttl_s=RESULT_TTL_S, max_num_seqs=64, take_limit=64, num_blocks=1024)

    def at_rest() -> tuple[int, int]:
        out = f"{queue.prefix}:req:*"
        wait_until(lambda: not list(queue.raw.scan_iter(out, count=10_000)), 30, "results have expired")
        queue.judge(may_be_gone=True)
        return _used_bytes(queue.raw), _memory_bytes(worker.pid)

    _run_jobs(queue, "warm", 500)
    server_before, worker_before = at_rest()
    _run_jobs(queue, "job", num_jobs)
    keys = list(queue.raw.scan_iter(f"{queue.prefix}:*", count=10_000))
    without = {key.decode() for key in keys if queue.raw.pttl(key) == -1}
    require(without <= {*queue.keys.all_jobs, queue.keys.dead}, f"I5 without a time to live: {without}")
    server_after, worker_after = at_rest()
    progress(
        f"{num_jobs} jobs: server {server_before >> 10} to {server_after >> 10} KiB, "
        f"worker {worker_before >> 20} to {worker_after >> 20} MiB"
    )
    assert server_after - server_before < 256 * 1024
    assert worker_after - worker_before < 2048 * 1024 + 1024 * num_jobs
    assert set(queue.raw.keys(f"{queue.prefix}:*")) == {
        *(key.encode() for key in queue.keys.all_jobs),
        queue.keys.worker(worker.name).encode(),
    }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _share(server: Server, over_s: float) -> float:
    """The part of a core that the server uses."""
    begun_s, before_s = time.monotonic(), _cpu_s(server.pid)
    time.sleep(over_s)
    return (_cpu_s(server.pid) - before_s) / (time.monotonic() - begun_s)


@pytest.fixture
def crowded(own_server: Callable[..., Server], prefix: str, is_full: bool) -> Iterator[tuple[Server, Keys]]:
    """A server on which a live consumer holds very many entries."""
    server, keys = own_server(), Keys(prefix, "default")
    with server.client() as client:
        for key in keys.all_jobs:
            client.xgroup_create(key, "workers", "0", mkstream=True)
        job = json.dumps({"prompt": "x", "max_tokens": 1, "seed": 1})
        for first in range(0, 100_000 if is_full else 20_000, 5_000):
            pipeline = client.pipeline(transaction=False)
            for number in range(5_000):
                pipeline.xadd(keys.jobs(), {"id": f"held-{first + number}", "json": job})
            pipeline.execute()
        while client.xreadgroup("workers", "another", {keys.jobs(): ">"}, count=5_000):
            pass
    yield server, keys


def test_very_many_pending_entries_cost_a_fixed_share(
    crowded: tuple[Server, Keys], spawn: Callable[..., Worker], is_full: bool, progress: Callable[[str], None]
) -> None:
    """The entry at the very end that nobody holds is found all the same, and looking for it costs each worker 2 %.

    The workers are busy meanwhile: how often they look may not depend on how often they step.
    """
    server, keys = crowded
    client = server.client()
    num_workers, over_s = (4, 10.0) if is_full else (2, 2.0)
    alone = _share(server, over_s / 4)
    for number in range(num_workers):
        busy = {"prompt": "x", "max_tokens": 4000, "seed": number, "ignore_eos": True}
        client.xadd(keys.jobs("high"), {"id": f"busy-{number}", "json": json.dumps(busy)})
        spawn(server, lease_s=60.0, step_time_s=0.005, max_model_len=4096).wait_ready()
    wait_until(lambda: all(client.exists(keys.out(f"busy-{number}")) for number in range(num_workers)), 20, "all run")
    share = _share(server, over_s)
    entry = {"id": "lost", "json": json.dumps({"prompt": "x", "max_tokens": 1, "seed": 1})}
    begun_s = time.monotonic()
    pipeline = client.pipeline(transaction=True)  # taken, and left for longer than any lease, before anyone else looks
    entry_id = f"{int(time.time() * 1000) + 3_600_000}-0"
    pipeline.xadd(keys.jobs(), entry, id=entry_id)
    pipeline.xgroup_setid(keys.jobs(), "workers", entry_id)
    pipeline.xclaim(keys.jobs(), "workers", "dead", 0, [entry_id], idle=10**9, force=True, justid=True)
    pipeline.execute()
    wait_until(lambda: client.exists(keys.out("lost")), 20, "it is found")
    took_s = time.monotonic() - begun_s
    pending = client.xpending(keys.jobs(), "workers")["pending"]
    client.close()
    progress(
        f"{pending} pending, {num_workers} workers: {share:.1%} of a core ({alone:.1%} alone), found in {took_s:.1f} s"
    )
    assert share < 0.02 * num_workers + 0.08  # their appends are in it
    assert took_s < 8.0
