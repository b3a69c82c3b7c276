"""A worker that stood still longer than its lease gets nothing in: not behind its successor, and not ahead of it.

MONITOR shows who appended what, and what the server took of it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.chaos_monitor import Monitor
from tests.support.chaos_queue import ChaosQueue
from tests.support.chaos_workers import LEASE_S, Worker
from tests.support.proxy import Proxy
from tests.support.server import Server
from tests.support.worker_process import wait_until

JOB: dict[str, Any] = {"prompt": "Hello", "seed": 5, "max_tokens": 60, "ignore_eos": True}
STEP = {"step_time_s": 0.01}
FREEZE_AT_20 = [["job", 20, int(signal.SIGSTOP), 0]]


def _taken(monitor: Monitor, queue: ChaosQueue, connections: set[str]) -> int:
    """How many appends of these connections the server has taken."""
    appends = monitor.appends(queue.keys.out("job"))
    return sum(accepted for client, accepted in appends if client in connections)


def test_waking_behind_its_successor(
    chaos_queue: ChaosQueue, spawn: Callable[..., Worker], monitor_of: Callable[[Server], Monitor]
) -> None:
    """The next attempt has begun: what the frozen step still gives, and all that follows, is nobody's any more."""
    monitor = monitor_of(chaos_queue.server)
    first = spawn(chaos_queue, **STEP, fates=FREEZE_AT_20)
    first.wait_ready()
    connections = monitor.connections_of(first.name)
    chaos_queue.add("job", **JOB)
    wait_until(lambda: first.is_frozen, 20, "the worker stands still")
    taken = _taken(monitor, chaos_queue, connections)
    spawn(chaos_queue, **STEP)
    chaos_queue.wait_attempts("job", 2)
    first.thaw()
    wait_until(lambda: "lost the lease" in first.output() or "fenced" in first.output(), 20, "it has learnt of it")
    found = chaos_queue.judge()
    assert _taken(monitor, chaos_queue, connections) == taken
    assert len(found.reports["job"].attempts) == 2
    first.stop()
    assert first.wait() == 0
    assert first.counter("lost_leases") + first.counter("fenced") == 1


@pytest.mark.full_size
def test_what_was_under_way_while_it_was_overtaken_is_refused(
    chaos_queue: ChaosQueue,
    proxy_to: Callable[..., Proxy],
    spawn: Callable[..., Worker],
    monitor_of: Callable[[Server], Monitor],
) -> None:
    """A write that the network held back longer than the lease comes in behind the next attempt, and is refused."""
    proxy, monitor = proxy_to(chaos_queue.server), monitor_of(chaos_queue.server)
    first = spawn(proxy, **STEP, socket_timeout_s=30.0)
    first.wait_ready()
    chaos_queue.add("job", **JOB)
    chaos_queue.wait_tokens("job", 5)
    proxy.hold()
    connections = monitor.connections_of(first.name)
    spawn(chaos_queue, **STEP)
    chaos_queue.wait_attempts("job", 2)
    taken, tried = _taken(monitor, chaos_queue, connections), len(monitor.appends(chaos_queue.keys.out("job")))
    proxy.release()
    wait_until(lambda: "fenced" in first.output() or "lost the lease" in first.output(), 20, "it has learnt of it")
    chaos_queue.judge()
    late = [taken for client, taken in monitor.appends(chaos_queue.keys.out("job"))[tried:] if client in connections]
    assert late, "no write was under way"
    assert not any(late)
    assert _taken(monitor, chaos_queue, connections) == taken


def test_waking_ahead_of_its_successor(
    chaos_queue: ChaosQueue,
    proxy_to: Callable[..., Proxy],
    spawn: Callable[..., Worker],
    monitor_of: Callable[[Server], Monitor],
) -> None:
    """Another has taken the entry and begun nothing yet: the stream would still take a write, so none may be made.

    Not even while it is not known: the reply to the renewal that tells is a while under way.
    """
    proxy, monitor = proxy_to(chaos_queue.server), monitor_of(chaos_queue.server)
    first = spawn(proxy, **STEP, fates=FREEZE_AT_20)
    first.wait_ready()
    entry_id = chaos_queue.add("job", **JOB)
    wait_until(lambda: first.is_frozen, 20, "the worker stands still")
    tried = len(monitor.appends(chaos_queue.keys.out("job")))
    time.sleep(LEASE_S)
    chaos_queue.raw.xclaim(chaos_queue.keys.jobs(), "workers", "successor", int(LEASE_S * 1000), [entry_id])
    assert chaos_queue.owner(entry_id) == "successor"
    proxy.delay_s = 0.2
    first.thaw()
    wait_until(lambda: "lost the lease" in first.output(), 20, "it has learnt of it")
    assert len(monitor.appends(chaos_queue.keys.out("job"))) == tried
    assert chaos_queue.owner(entry_id) == "successor"
    proxy.delay_s = 0.0
    found = chaos_queue.judge()  # when that one's lease has run out, too, it is taken as any other
    assert len(found.reports["job"].attempts) == 2


@pytest.mark.full_size
def test_a_write_between_its_successors_look_and_its_beginning(
    chaos_queue: ChaosQueue, proxy_to: Callable[..., Proxy], spawn: Callable[..., Worker]
) -> None:
    """The successor has read the stream; then the write comes in, and its `started` is refused: it reads again."""
    proxy, slow = proxy_to(chaos_queue.server), proxy_to(chaos_queue.server)
    options = {**STEP, "socket_timeout_s": 30.0, "lease_s": 2.5}
    first = spawn(proxy, **options)
    first.wait_ready()
    second = spawn(slow, **options)
    second.wait_ready()
    entry_id = chaos_queue.add("job", **JOB)
    wait_until(lambda: chaos_queue.owner(entry_id), 20, "it is taken")
    if chaos_queue.owner(entry_id) == second.name:
        first, second, proxy, slow = second, first, slow, proxy
    chaos_queue.wait_tokens("job", 5)
    proxy.hold()
    before = chaos_queue.num_tokens("job")
    slow.delay_s = 0.5  # of every reply: 0.5 s from the claim to the look, 0.5 s more to the beginning
    wait_until(lambda: chaos_queue.owner(entry_id) == second.name, 20, "the successor has it")
    time.sleep(0.75)
    proxy.release()
    wait_until(lambda: "another entry came first" in second.output(), 20, "the successor looks again")
    slow.delay_s = 0.0
    found = chaos_queue.judge()
    report = found.reports["job"]
    assert len(report.attempts) == 2
    assert report.attempts[0].num_tokens > before
