"""Cancelling: what is queued, runs, has ended, or is not known; twice; with lost replies; from far away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import redis

from headrace.clients import CancelOutcome, Client, ConfigError, ConflictError, Finished, Keys, Policy, UnavailableError
from headrace.clients.lua import APPEND, CANCEL
from headrace.clients.payload import unpack
from tests.clients.hand_worker import HandWorker
from tests.support.proxy import Proxy
from tests.support.server import Server


@pytest.mark.parametrize("fmt", ["msgpack", "json"])
def test_a_queued_request_ends_before_any_attempt(client: Client, raw: redis.Redis, keys: Keys, fmt: str) -> None:
    handle = client.submit("Hello", fmt=fmt)
    raw.set(keys.cancel(handle.id), "1", px=60_000)
    assert handle.cancel() is CancelOutcome.CANCELLED
    (queued_id, _), (end_id, fields) = raw.xrange(keys.out(handle.id))
    assert int(end_id.split(b"-")[1]) == int(queued_id.split(b"-")[1]) + 1
    field = "d" if fmt == "msgpack" else "json"
    assert unpack(fields[field.encode()], field) == {
        "e": "finished",
        "reason": "cancelled",
        "usage": {"prompt": 0, "completion": 0, "cached": 0},
        "done": True,
    }
    assert 590_000 < raw.pttl(keys.out(handle.id)) <= 600_000
    assert not raw.exists(keys.cancel(handle.id))
    result = handle.result(timeout_s=1)
    assert (result.reason, result.text, result.attempts, result.error) == ("cancelled", "", 0, None)


def test_again_it_has_ended(client: Client, raw: redis.Redis, keys: Keys) -> None:
    handle = client.submit("Hello")
    assert [handle.cancel() for _ in range(3)] == ["cancelled", "already finished", "already finished"]
    assert raw.xlen(keys.out(handle.id)) == 2
    assert not raw.exists(keys.cancel(handle.id))


def test_a_cancelled_id_goes_on_naming_its_request(client: Client, raw: redis.Redis, keys: Keys) -> None:
    client.submit("Hello", id="a").cancel()
    again = client.submit("Hello", id="a")
    assert not again.added
    assert again.result(timeout_s=1).reason == "cancelled"
    with pytest.raises(ConflictError):
        client.submit("Goodbye", id="a")
    assert raw.xlen(keys.jobs()) == 1


@pytest.mark.parametrize("bare", [False, True])
def test_a_running_request_is_told_by_its_next_append(
    client: Client, raw: redis.Redis, keys: Keys, work: Callable[..., HandWorker], bare: bool
) -> None:
    if not bare:
        client.submit("Hello", id="a")
    worker = work("a")
    worker.start()
    worker.tokens("x")
    assert [client.cancel("a") for _ in range(2)] == ["requested", "requested"]
    assert 50_000 < raw.pttl(keys.cancel("a")) <= 60_000  # the hand worker's time for the stream
    assert not worker.flagged
    worker.tokens("y")
    assert worker.flagged
    worker.finish("cancelled")
    assert not raw.exists(keys.cancel("a"))
    assert client.cancel("a") is CancelOutcome.FINISHED
    assert not raw.exists(keys.cancel("a"))


def test_between_two_attempts_it_is_asked_for_too(
    client: Client, raw: redis.Redis, keys: Keys, work: Callable[..., HandWorker]
) -> None:
    worker = work("a")
    worker.start()
    worker.release()
    assert client.cancel("a") is CancelOutcome.REQUESTED
    worker.start()
    assert worker.flagged


def test_one_choice_that_has_finished_is_not_the_end(client: Client, work: Callable[..., HandWorker]) -> None:
    worker = work("a")
    worker.start()
    event = Finished(worker.next(), "stop", choice=1)
    worker.append(event, event.id, 0)
    assert client.cancel("a") is CancelOutcome.REQUESTED


def test_an_unknown_id_may_be_a_bare_job_and_gets_a_flag(
    client: Client, raw: redis.Redis, keys: Keys, work: Callable[..., HandWorker]
) -> None:
    assert client.cancel("a") is CancelOutcome.UNKNOWN
    assert 86_000_000 < raw.pttl(keys.cancel("a")) <= 86_400_000
    worker = work("a")
    worker.start()
    assert worker.flagged


def test_an_id_that_cannot_be(client: Client) -> None:
    with pytest.raises(ConfigError):
        client.cancel("a b")


@pytest.mark.parametrize("command", [b"XREVRANGE", b"EVALSHA"])
@pytest.mark.parametrize("before", [False, True])
def test_a_lost_reply_changes_nothing(
    server: Server, proxy_to: Callable[..., Proxy], client: Client, raw: redis.Redis, keys: Keys, command: bytes,
    before: bool, work: Callable[..., HandWorker],
) -> None:  # fmt: skip
    raw.script_load(APPEND.source)
    raw.script_load(CANCEL.source)
    proxy = proxy_to(server)
    client.submit("Hello", id="queued")
    client.submit("Hello", id="running")
    work("running").start()
    with Client(proxy.url, prefix=keys.prefix, queue=keys.queue) as far:
        for request_id, outcome in (("queued", "cancelled"), ("running", "requested"), ("unknown", "unknown")):
            loss = proxy.lose_reply(command, before=before)
            assert far.cancel(request_id) == outcome
            assert loss.num_lost == 1
    assert raw.xlen(keys.out("queued")) == 2
    assert raw.exists(keys.cancel("running")) == raw.exists(keys.cancel("unknown")) == 1


def test_many_cancels_and_a_start_at_once_give_one_end_or_one_flag(
    server: Server, client: Client, raw: redis.Redis, keys: Keys, work: Callable[..., HandWorker]
) -> None:
    for number in range(15):
        request_id = client.submit("Hello", id=f"a{number}").id
        outcomes: list[str] = []
        worker = work(request_id)
        gate = threading.Barrier(4)

        def cancel(request_id: str = request_id, gate: threading.Barrier = gate, seen: list[str] = outcomes) -> None:
            gate.wait()
            seen.append(client.cancel(request_id))

        threads = [threading.Thread(target=cancel) for _ in range(3)]
        for thread in threads:
            thread.start()
        gate.wait()
        seconds, micros = raw.time()
        at = (seconds * 1000 + micros // 1000, 0)
        begun = worker.append({"e": "tokens", "i": 0, "t": [1]}, at)
        for thread in threads:
            thread.join()
        if begun:
            assert outcomes == ["requested"] * 3
            assert raw.exists(keys.cancel(request_id))
        else:
            assert sorted(outcomes) == ["already finished", "already finished", "cancelled"]
            assert raw.xlen(keys.out(request_id)) == 2
            assert not raw.exists(keys.cancel(request_id))


def test_from_far_away_a_fast_stream_is_cancelled_too(
    server: Server, proxy_to: Callable[..., Proxy], raw: redis.Redis, keys: Keys, work: Callable[..., HandWorker]
) -> None:
    proxy = proxy_to(server)
    proxy.delay_s = 0.05
    worker = work("a")
    worker.start()
    over = threading.Event()

    def stream_fast() -> None:
        while not worker.flagged and not over.wait(0.002):
            worker.tokens("x")

    streaming = threading.Thread(target=stream_fast)
    streaming.start()
    try:
        with Client(proxy.url, prefix=keys.prefix, queue=keys.queue) as far:
            started_s = time.monotonic()
            assert far.cancel("a") is CancelOutcome.REQUESTED
            assert time.monotonic() - started_s < 3
        streaming.join(2)
        assert worker.flagged
    finally:
        over.set()
        streaming.join()


def test_giving_up(server: Server, proxy_to: Callable[..., Proxy], keys: Keys) -> None:
    proxy = proxy_to(server)
    proxy.refuse()
    with Client(proxy.url, prefix=keys.prefix, queue=keys.queue, policy=Policy(give_up_s=0.2)) as client:
        with pytest.raises(UnavailableError) as caught:
            client.cancel("a")
        assert caught.value.id == "a"
