"""Each single reply of the protocol lost: the server has carried the command out, the worker does not know.

The proxy cuts the connection instead of passing the reply on; `before`: the command itself is lost. In no case is a job
lost, run twice, or a token told twice, and nobody else is needed to repair it (the lease is far longer than the test).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.clients.events import Started
from headrace.worker import lua
from tests.support.proxy import Proxy
from tests.support.rig import Rig, abandon
from tests.support.worker_process import wait_until

JOB = {"prompt": "Hello", "max_tokens": 30, "seed": 3, "ignore_eos": True}
SHA = {script.name: script.sha.encode() for script in lua.ALL}

CASES: dict[str, tuple[bytes, ...]] = {
    "take": (SHA["take"],),
    "read": (b"XRANGE", b"{my-1}:out"),
    "started": (SHA["append"], b'"started"'),
    "first token": (SHA["append"], b'"i":0,'),
    "token in the middle": (SHA["append"], b'"i":12,'),
    "finished": (SHA["append"], b'"done"'),
    "acknowledge": (SHA["acknowledge"],),
}


@pytest.mark.parametrize("before", [False, True], ids=["reply", "command"])
@pytest.mark.parametrize("case", CASES)
def test_one_reply_lost(proxy_to: Callable[..., Proxy], rig: Rig, case: str, before: bool) -> None:
    proxy = proxy_to(rig.server)
    loss = proxy.lose_reply(*CASES[case], before=before)
    rig.submit("my-1", JOB)  # which has a stream to read, unlike a bare job that is new
    worker = rig.worker(url=proxy.url, lease_s=60.0, step_time_s=0.002)
    rig.wait_done("my-1", timeout_s=4)
    rig.wait_empty(timeout_s=4)
    assert loss.happened.wait(2)
    assert len(rig.started("my-1")) == 1
    assert rig.num_tokens("my-1") == 30
    assert worker.counters.attempts == 1
    wait_until(lambda: worker.counters.reconnects == 1)
    wait_until(lambda: not rig.pending())


def test_the_reply_to_a_blocking_read_lost(proxy_to: Callable[..., Proxy], rig: Rig) -> None:
    proxy = proxy_to(rig.server)
    worker = rig.worker(url=proxy.url, lease_s=60.0)
    loss = proxy.lose_reply(b"XREADGROUP", b"BLOCK", skip=1)
    assert loss.happened.wait(3)
    rig.add("my-1", JOB)
    rig.wait_done("my-1", timeout_s=4)
    assert worker.counters.lost_replies == 1


def test_the_reply_to_a_claim_lost(proxy_to: Callable[..., Proxy], rig: Rig) -> None:
    proxy = proxy_to(rig.server)
    entry_id = abandon(rig, "my-1")
    loss = proxy.lose_reply(b"XCLAIM", rig.prefix.encode(), entry_id.encode())
    worker = rig.worker(url=proxy.url, lease_s=60.0)
    rig.wait_done("my-1", timeout_s=4)
    assert loss.happened.is_set()
    assert worker.counters.lost_replies == 1
    assert worker.counters.recovered == 0


def test_the_reply_to_a_renewal_lost(proxy_to: Callable[..., Proxy], rig: Rig) -> None:
    proxy = proxy_to(rig.server)
    worker = rig.worker(url=proxy.url, lease_s=1.5, step_time_s=0.05)
    loss = proxy.lose_reply(SHA["renew"])
    rig.add("my-1", {**JOB, "max_tokens": 50})
    rig.wait_done("my-1")
    assert loss.happened.is_set()
    assert (worker.counters.attempts, worker.counters.lost_leases, worker.counters.fenced) == (1, 0, 0)


def test_the_reply_to_creating_the_groups_lost(proxy_to: Callable[..., Proxy], rig: Rig) -> None:
    proxy = proxy_to(rig.server)
    loss = proxy.lose_reply(b"MKSTREAM")
    rig.add("my-1", JOB)
    rig.worker(url=proxy.url)
    rig.wait_done("my-1", timeout_s=4)
    assert loss.happened.is_set()


def test_the_reply_to_handing_back_lost(proxy_to: Callable[..., Proxy], rig: Rig) -> None:
    proxy = proxy_to(rig.server)
    first = rig.worker(url=proxy.url, lease_s=60.0, step_time_s=0.02)
    rig.add("my-1", {**JOB, "max_tokens": 100})
    rig.wait_tokens("my-1", 3)
    loss = proxy.lose_reply(SHA["hand_back"])
    assert first.stop(2) == 0
    assert loss.happened.is_set()
    rig.worker(lease_s=60.0)
    rig.wait_done("my-1")
    assert rig.num_tokens("my-1") == 100


@pytest.mark.parametrize("seed", range(3))
def test_replies_lost_all_along(proxy_to: Callable[..., Proxy], rig: Rig, seed: int) -> None:
    """The connections of a worker under load are cut a dozen times: every request is told once and whole."""
    proxy = proxy_to(rig.server)
    worker = rig.worker(url=proxy.url, lease_s=60.0, step_time_s=0.004, max_num_seqs=8)
    for number in range(12):
        proxy.lose_reply(SHA["append"], skip=3 + 7 * number + seed)
    for number in range(30):
        rig.add(f"my-{number}", {**JOB, "seed": number}, kind="job" if number % 2 else "json")
    rig.wait_done(*rig.submitted, timeout_s=30)
    rig.wait_empty()
    assert worker.counters.reconnects >= 8
    for request_id in rig.submitted:
        assert rig.num_tokens(request_id) == 30
        assert [type(event) for event in rig.events(request_id)].count(Started) == 1


def test_connections_cut_many_times_while_idle_and_busy(proxy_to: Callable[..., Proxy], rig: Rig) -> None:
    proxy = proxy_to(rig.server)
    rig.worker(url=proxy.url, lease_s=3.0)
    for number in range(5):
        proxy.cut()
        rig.add(f"my-{number}", JOB)
        rig.wait_done(f"my-{number}", timeout_s=5)


def test_a_server_out_of_reach_for_a_while(proxy_to: Callable[..., Proxy], rig: Rig) -> None:
    """Longer than the lease: nobody else took the job, so this attempt goes on, and nothing is dropped."""
    proxy = proxy_to(rig.server)
    worker = rig.worker(url=proxy.url, lease_s=0.9, step_time_s=0.01)
    rig.add("my-1", {**JOB, "max_tokens": 60})
    rig.wait_tokens("my-1", 5)
    proxy.refuse()
    wait_until(lambda: not worker.service.links.writing.is_connected)
    import time

    time.sleep(1.2)
    proxy.accept()
    rig.wait_done("my-1")
    assert len(rig.started("my-1")) == 1
    assert worker.counters.attempts == 1
