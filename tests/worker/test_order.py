"""What must not happen before something else has: no acknowledgement, no entry, no beginning too early."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.worker import lua
from tests.support.proxy import Proxy
from tests.support.rig import Rig
from tests.support.worker_process import wait_until

JOB = {"prompt": "Hello", "max_tokens": 30, "seed": 3, "ignore_eos": True}
APPEND, ACKNOWLEDGE = lua.APPEND.sha.encode(), lua.ACKNOWLEDGE.sha.encode()


def test_no_acknowledgement_before_the_last_entries_are_seen_again(proxy_to: Callable[..., Proxy], rig: Rig) -> None:
    """The acknowledgement never reached the server, the connection is new, and the first thing sent is lost as well.

    What is sent first must be the last entry alone: had the acknowledgement gone with it, the job would be gone.
    """
    proxy = proxy_to(rig.server)
    proxy.lose_reply(ACKNOWLEDGE, before=True)
    probe = proxy.lose_reply(APPEND, b"{my-1}", b'"done"', skip=1)  # the second time it is sent
    worker = rig.worker(url=proxy.url, lease_s=60.0)
    rig.add("my-1", JOB)
    assert probe.happened.wait(5)
    assert rig.num_jobs() == 1
    rig.wait_empty()
    assert worker.counters.acknowledged == 1


def test_a_stream_whose_end_was_lost_is_mended_before_its_job_is_acknowledged(
    proxy_to: Callable[..., Proxy], rig: Rig
) -> None:
    proxy = proxy_to(rig.server)
    worker = rig.worker(url=proxy.url, lease_s=60.0)
    loss = proxy.lose_reply(ACKNOWLEDGE, before=True)
    refused = proxy.refuse
    rig.add("my-1", JOB)
    assert loss.happened.wait(5)
    refused()
    whole = rig.raw("my-1")
    out = rig.keys.out("my-1")
    rig.client.delete(out)
    for entry_id, fields in whole[:-4]:
        rig.client.xadd(out, fields, id=entry_id)
    rig.client.pexpire(out, 600_000)
    proxy.accept()
    rig.wait_empty()
    assert rig.raw("my-1") == whole
    assert worker.counters.attempts == 1


def test_nothing_is_told_after_a_missed_renewal_until_one_succeeds(rig: Rig) -> None:
    worker = rig.worker(lease_s=1.2, step_time_s=0.02)
    rig.add("my-1", {**JOB, "max_tokens": 120})
    rig.wait_tokens("my-1", 3)
    link = worker.service.links.leases
    ensure, link.ensure = link.ensure, lambda: False  # type: ignore[method-assign]
    time.sleep(0.4 + 0.6 + 0.2)  # renewed up to a third of the lease ago, then half of it, then some
    silent = len(rig.raw("my-1"))
    time.sleep(0.3)
    assert len(rig.raw("my-1")) == silent
    link.ensure = ensure  # type: ignore[method-assign]
    wait_until(lambda: len(rig.raw("my-1")) > silent, 2)
    rig.wait_done("my-1")
    assert len(rig.started("my-1")) == 1


def test_a_job_whose_lease_has_run_out_is_not_begun(proxy_to: Callable[..., Proxy], rig: Rig) -> None:
    """Taken, then cut off for longer than the lease, with renewals held up: begun only when one has succeeded."""
    proxy = proxy_to(rig.server)
    worker = rig.worker(url=proxy.url, lease_s=0.6)
    link = worker.service.links.leases
    ensure, link.ensure = link.ensure, lambda: False  # type: ignore[method-assign]
    loss = proxy.lose_reply(b"XRANGE", b"{my-1}:out", before=True)
    rig.submit("my-1", JOB)
    queued = rig.raw("my-1")
    assert loss.happened.wait(5)
    proxy.refuse()
    time.sleep(0.7)
    proxy.accept()
    wait_until(lambda: worker.counters.reconnects == 1)
    time.sleep(0.3)
    assert rig.raw("my-1") == queued
    link.ensure = ensure  # type: ignore[method-assign]
    rig.wait_done("my-1")


def test_the_writing_side_never_sends_twice_by_itself(proxy_to: Callable[..., Proxy], rig: Rig) -> None:
    """After a lost reply the entry before it is sent again, whose refusal tells what is in: MONITOR counts."""
    proxy = proxy_to(rig.server)
    worker = rig.worker(url=proxy.url, lease_s=60.0)
    proxy.lose_reply(APPEND, b'"i":5,')
    with rig.client.monitor() as monitor:
        rig.add("my-1", JOB)
        rig.wait_done("my-1")
        rig.wait_empty()
        rig.client.echo("end of test")
        sent = dict.fromkeys(range(3, 7), 0)
        for command in monitor.listen():
            text = command["command"]
            if "end of test" in text:
                break
            if text.startswith("EVALSHA") and lua.APPEND.sha in text and "{my-1}" in text:
                for index in sent:
                    sent[index] += f'"i":{index},' in text
    assert sent == {3: 1, 4: 2, 5: 1, 6: 1}
    assert worker.counters.resent >= 1
    assert rig.num_tokens("my-1") == 30


def test_one_pipeline_carries_a_steps_entries(rig: Rig) -> None:
    """Ten requests of forty tokens: hardly more round trips than steps."""
    worker = rig.worker(step_time_s=0.005)
    link = worker.service.links.writing
    count, start = [0], link.start

    def counting(commands: object) -> None:
        count[0] += 1
        start(commands)  # type: ignore[arg-type]

    link.start = counting  # type: ignore[method-assign]
    for number in range(10):
        rig.add(f"my-{number}", {**JOB, "max_tokens": 40})
    rig.wait_done(*rig.submitted)
    assert count[0] < 1.5 * worker.engine.step_count + 30
