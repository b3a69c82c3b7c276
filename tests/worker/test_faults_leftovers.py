"""What is left in a worker when everything is over, what renewing costs, and whose turn it is."""

from __future__ import annotations

import random
import time
from typing import Any

from headrace.clients import Client
from headrace.engine.sequence import Sequence
from headrace.worker import lua
from headrace.worker.held import Channel, Held
from tests.support.leftovers import alive, num_reachable
from tests.support.rig import Rig
from tests.support.worker_process import wait_until

JOB = {"prompt": "Hello", "max_tokens": 30, "seed": 3, "ignore_eos": True}


def random_job(rng: random.Random) -> dict[str, Any]:
    """Short and long, streamed or not, with held-back text, several choices, some of them refused."""
    job: dict[str, Any] = {"prompt": "Hello " * rng.randint(1, 9), "max_tokens": rng.randint(1, 25)}
    if rng.random() < 0.3:
        job["stop"] = ["zzzz", "\\x00\\x01"]
    if rng.random() < 0.2:
        job["n"] = 3
    if rng.random() < 0.3:
        job["stream"] = False
    if rng.random() < 0.05:
        job["response_format"] = {"type": "regex"}
    if rng.random() < 0.05:
        job["prompt_token_ids"] = [1]  # one prompt too many
    return job


def test_requests_that_ended_or_were_cancelled_leave_nothing_in_the_worker(rig: Rig) -> None:
    """Also of those that were cancelled while they were prepared, ran, or waited in the queue."""
    worker = rig.worker(lease_s=0.6, max_num_seqs=16, step_time_s=0.002)
    rng = random.Random(5)

    def serve(prefix: str, count: int) -> None:
        for number in range(count):
            kind, priority = rng.choice(("json", "job")), rng.choice(("high", "normal", "low"))
            rig.add(f"{prefix}{number}", random_job(rng), kind=kind, priority=priority)
            while rig.num_jobs() > 24:
                time.sleep(0.002)
            if rng.random() < 0.7:  # one that is held just now, or was a moment ago, or comes soon
                running = [held.request_id or "" for held in worker.service.context.memory]
                victim = rng.choice([*running, f"{prefix}{number}"])
                rig.client.set(rig.keys.cancel(victim), "1", px=60_000)
        rig.wait_done(*(f"{prefix}{number}" for number in range(count)), timeout_s=60)
        rig.wait_empty()
        outbox: Any = worker.service.loop._outbox
        wait_until(lambda: not outbox._kept, 5)  # an ended stream is kept for a lease, in case a failover loses its end
        worker.log.lines.clear()

    serve("early-", 40)
    few = num_reachable(worker.service.loop)
    serve("leak-", 500)
    context = worker.service.context
    assert (len(context.memory), len(context.leases), worker.engine.requests) == (0, 0, 0)
    stats = worker.engine.stats()
    assert stats.free_blocks == stats.total_blocks
    runner: Any = worker.engine.runner
    runner._tables.clear()  # the scripted runner's own notes
    assert alive((Sequence,), "leak-") == []
    most = context.settings.num_prepare_threads  # each of these still has in hand what it did last
    assert len(alive((Held,), "leak-")) <= most
    assert len(alive((Channel,), "leak-")) <= most
    # The prefix cache may hold more than before: an entry and its tokens for each block.
    assert num_reachable(worker.service.loop) <= few + 2 * stats.cached_blocks + 50
    assert context.counters.cancelled > 50


def test_renewing_moves_no_payloads(rig: Rig) -> None:
    """Sixty kilobytes of stop strings for each of six jobs, renewed ten times a second: only ids go over the line."""
    worker = rig.worker(lease_s=0.6, step_time_s=0.02, max_num_seqs=8)
    for number in range(6):
        rig.add(f"my-{number}", {**JOB, "max_tokens": 120, "stop": ["y" * 1000] * 60})
    wait_until(lambda: all(rig.num_tokens(f"my-{number}") > 0 for number in range(6)))
    sent: list[str] = []
    begun_s = time.monotonic()
    with rig.client.monitor() as monitor:
        for command in monitor.listen():
            sent.append(command["command"])
            if time.monotonic() - begun_s > 0.5:
                break
    renewals = [text for text in sent if lua.RENEW.sha in text]
    claims = [text for text in sent if text.startswith("XCLAIM") and rig.prefix in text]
    assert renewals
    assert claims
    assert all("JUSTID" in text for text in claims)
    assert all(len(text) < 1000 for text in renewals)
    rig.wait_done(*rig.submitted)
    assert worker.counters.attempts == 6


def test_a_job_of_high_priority_that_came_last_is_done_first(rig: Rig) -> None:
    """What the client says is what the scheduler acts on: all places taken, and the pool too small for one more."""
    from tests.support.scripted import ScriptedRunner

    seen: dict[str, int] = {}
    worker = rig.worker(runner=ScriptedRunner(num_blocks=24, max_model_len=400, step_time_s=0.02), max_num_seqs=2)
    engine: Any = worker.engine
    add = engine.add

    def watched(request: Any) -> None:
        seen[request.request_id.partition("#")[0]] = request.priority
        add(request)

    engine.add = watched
    with Client(rig.server.url, prefix=rig.prefix) as client:
        for number in range(5):
            client.submit("Hello", id=f"low-{number}", priority="low", max_tokens=60, ignore_eos=True)
        rig.wait_tokens("low-1", 1)
        client.submit("Hello", id="normal", max_tokens=5, ignore_eos=True)
        client.submit("Hello", id="high", priority="high", max_tokens=5, ignore_eos=True)
    # Where two places come free at once, two are begun in the same millisecond: sorting keeps this order of them.
    names = ["high", "normal", *(f"low-{number}" for number in range(5))]
    rig.submitted += names
    rig.wait_done(*names)
    ended = sorted(names, key=lambda name: rig.raw(name)[-1][0])
    begun = sorted(names, key=lambda name: rig.started(name)[0].id)
    assert begun[2:4] == ["high", "normal"]
    assert ended.index("high") < ended.index("low-2")
    assert (seen["high"], seen["normal"], seen["low-4"]) == (-1, 0, 1)
