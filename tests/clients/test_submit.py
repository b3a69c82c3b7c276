"""Submitting: what is written, in which order, once, however often it is asked and whatever replies are lost."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from headrace.clients import (
    Client,
    ConfigError,
    ConflictError,
    Finished,
    InvalidJobError,
    Keys,
    Policy,
    QueueFullError,
    ServerError,
    UnavailableError,
)
from headrace.clients.entries import encode, to_map
from headrace.clients.events import Queued
from headrace.clients.job import decode_entry, decode_job
from headrace.clients.lua import APPEND
from headrace.clients.payload import unpack
from headrace.clients.submission import build
from tests.clients.hand_worker import HandWorker
from tests.support.proxy import Proxy
from tests.support.server import Server


def jobs_of(raw: redis.Redis, keys: Keys) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in raw.xrange(keys.jobs())]


def server_ms(raw: redis.Redis) -> int:
    seconds, micros = raw.time()
    return seconds * 1000 + micros // 1000


def write_queued(raw: redis.Redis, keys: Keys, request_id: str, fp: str, age_ms: int) -> None:
    field, payload = encode(to_map(Queued((0, 0), fp)), "d")
    at = f"0-{server_ms(raw) - age_ms}"
    raw.eval(APPEND.source, 2, keys.out(request_id), keys.cancel(request_id), "", at, field, payload, 60_000, "1")


def test_queued_is_written_then_the_job(client: Client, raw: redis.Redis, keys: Keys) -> None:
    before_ms = server_ms(raw)
    handle = client.submit("Hello", max_tokens=5)
    assert handle.added
    (fields,) = jobs_of(raw, keys)
    entry = decode_entry(fields)
    assert list(fields) == [b"id", b"job", b"v", b"fp"]
    assert (entry.id, entry.kind, fields[b"v"]) == (handle.id, "d", b"1")
    assert entry.fp == hashlib.sha256(entry.payload).hexdigest()
    assert unpack(entry.payload, "d") == {"prompt": "Hello", "max_tokens": 5}
    ((at, queued),) = raw.xrange(keys.out(handle.id))
    assert unpack(queued[b"d"], "d") == {"e": "queued", "fp": entry.fp}
    assert before_ms <= int(at.split(b"-")[1]) <= server_ms(raw)
    assert at.startswith(b"0-")
    assert 86_390_000 < raw.pttl(keys.out(handle.id)) <= 86_400_000


def test_json_and_priorities(client: Client, raw: redis.Redis, keys: Keys) -> None:
    for priority, key in zip(("high", "normal", "low"), keys.all_jobs, strict=True):
        handle = client.submit("한", fmt="json", priority=priority, id=priority)
        ((_, fields),) = raw.xrange(key)
        assert fields[b"json"] == '{"prompt":"한"}'.encode()
        assert b"json" in raw.xrange(keys.out(handle.id))[0][1]


def test_an_old_flag_is_deleted(client: Client, raw: redis.Redis, keys: Keys) -> None:
    raw.set(keys.cancel("a"), "1", px=60_000)
    client.submit("Hello", id="a")
    assert not raw.exists(keys.cancel("a"))


def test_ids_are_new_and_valid(client: Client) -> None:
    assert len({client.submit("Hello").id for _ in range(5)}) == 5


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129])
def test_an_id_that_cannot_be(client: Client, raw: redis.Redis, keys: Keys, bad: str) -> None:
    with pytest.raises(ConfigError):
        client.submit("Hello", id=bad)
    assert not raw.exists(keys.jobs())


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temprature": 1.0}, "temprature"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"stop": "END"}, "stop"),
        ({"metadata": {"a": "\ud83d"}}, "metadata"),
        ({"logit_bias": {1.5: 1}}, "logit_bias"),
        ({"logit_bias": {1: 1, "1": 2}}, "logit_bias"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"seed": 2**70}, "seed"),
    ],
)
def test_what_a_worker_would_refuse_is_not_sent(
    client: Client, raw: redis.Redis, keys: Keys, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidJobError) as caught:
        client.submit("Hello", **options)
    assert caught.value.param == param
    assert not list(raw.scan_iter(match=f"{keys.prefix}:*"))


def test_equal_requests_are_equal_bytes() -> None:
    plain = build(
        {"prompt": "a", "temperature": 1.0, "logit_bias": {7: 1.0, 30: 2.0}, "top_p": 1.0, "stop": ["x"]}, "a"
    )
    same = build(
        {"stop": ("x",), "top_p": 1, "logit_bias": {"30": 2, 7: 1}, "seed": None, "temperature": 1, "prompt": "a"}, "b"
    )
    assert (same.payload, same.fp) == (plain.payload, plain.fp)
    as_json = build({"prompt": "a", "logit_bias": {30: 2, 7: 1}, "temperature": 1}, fmt="json")
    assert as_json.payload == b'{"prompt":"a","temperature":1.0,"logit_bias":{"7":1.0,"30":2.0}}'
    assert decode_job(as_json.payload, "json").logit_bias == decode_job(plain.payload, "d").logit_bias
    chat = {"messages": [{"role": "user", "content": "b", "a": 1}], "metadata": {"z": 1, "a": 2}}
    assert (
        build(chat, fmt="json").payload
        == b'{"messages":[{"role":"user","content":"b","a":1}],"metadata":{"z":1,"a":2}}'
    )


@pytest.mark.parametrize(("name", "value"), [("priority", "urgent"), ("fmt", "xml")])
def test_other_words_are_refused(client: Client, name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        client.submit("Hello", **{name: value})
    assert caught.value.param == name


# --- the same id again ------------------------------------------------------------------------------------------------


def test_the_same_request_is_one(client: Client, raw: redis.Redis, keys: Keys) -> None:
    assert client.submit("Hello", id="a", temperature=1).added
    assert not client.submit("Hello", id="a", temperature=1.0).added
    assert len(jobs_of(raw, keys)) == 1
    assert raw.xlen(keys.out("a")) == 1


def test_another_request_under_its_id_is_a_conflict(client: Client, raw: redis.Redis, keys: Keys) -> None:
    client.submit("Hello", id="a")
    for other in ({"fmt": "json"}, {"max_tokens": 1}):
        with pytest.raises(ConflictError) as caught:
            client.submit("Hello", id="a", **other)
        assert caught.value.id == "a"
        assert caught.value.existing_fp == build({"prompt": "Hello"}).fp != caught.value.fp
    assert len(jobs_of(raw, keys)) == 1


def test_it_stays_one_while_it_runs_and_after_its_end(
    client: Client, raw: redis.Redis, keys: Keys, work: Callable[..., HandWorker]
) -> None:
    client.submit("Hello", id="a")
    worker = work("a")
    worker.start()
    assert not client.submit("Hello", id="a").added
    worker.finish()
    assert not client.submit("Hello", id="a").added
    with pytest.raises(ConflictError):
        client.submit("Goodbye", id="a")
    assert len(jobs_of(raw, keys)) == 1


def test_the_stream_of_a_bare_job_counts_by_its_started(client: Client, work: Callable[..., HandWorker]) -> None:
    work("a", fp=build({"prompt": "Hello"}).fp).start()
    assert not client.submit("Hello", id="a").added
    work("b").start()
    with pytest.raises(ConflictError) as caught:
        client.submit("Hello", id="b")
    assert caught.value.existing_fp == "f" * 64


def test_a_stream_that_says_nothing_of_its_request_is_a_conflict(client: Client, raw: redis.Redis, keys: Keys) -> None:
    for request_id, payload in (("a", b"\xc1"), ("b", b"\x81\xa1e\xa8released")):
        raw.eval(APPEND.source, 2, keys.out(request_id), keys.cancel(request_id), "", "1-1", "d", payload, 60_000, "1")
        with pytest.raises(ConflictError) as caught:
            client.submit("Hello", id=request_id)
        assert caught.value.existing_fp is None


@pytest.mark.parametrize(("age_ms", "added"), [(10_500, True), (5_000, False)])
def test_a_queued_without_its_job_gets_it_after_ten_seconds(
    client: Client, raw: redis.Redis, keys: Keys, age_ms: int, added: bool
) -> None:
    write_queued(raw, keys, "a", build({"prompt": "Hello"}).fp, age_ms)
    assert client.submit("Hello", id="a").added is added
    assert len(jobs_of(raw, keys)) == int(added)
    assert raw.xlen(keys.out("a")) == 1


def test_a_queued_of_old_whose_request_has_begun_gets_no_second_job(
    client: Client, raw: redis.Redis, keys: Keys, work: Callable[..., HandWorker]
) -> None:
    write_queued(raw, keys, "a", build({"prompt": "Hello"}).fp, 10_500)
    work("a").start()
    assert not client.submit("Hello", id="a").added
    assert not raw.exists(keys.jobs())


# --- a full queue -----------------------------------------------------------------------------------------------------


def test_a_full_queue_is_said_before_anything_is_written(server: Server, raw: redis.Redis, keys: Keys) -> None:
    with Client(server.url, prefix=keys.prefix, queue=keys.queue, policy=Policy(max_backlog=3)) as client:
        for priority in ("high", "normal", "low"):
            client.submit("Hello", id=priority, priority=priority)
        with pytest.raises(QueueFullError) as caught:
            client.submit("Hello", id="one-more")
        assert (caught.value.num_waiting, caught.value.max_backlog) == (3, 3)
        assert not raw.exists(keys.out("one-more"))
        assert not client.submit("Hello", id="low", priority="low").added  # what is in already is no more load
        # What a worker has taken waits no longer; what it has finished is gone.
        raw.xgroup_create(keys.jobs(), "workers", id="0")
        raw.xreadgroup("workers", "w", {keys.jobs(): ">"})
        assert client.submit("Hello", id="one-more").added
        with pytest.raises(QueueFullError):
            client.submit("Hello", id="and-another")


# --- lost replies -----------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(server: Server, proxy_to: Callable[..., Proxy]) -> Proxy:
    return proxy_to(server)


@pytest.fixture
def max_backlog() -> int | None:
    return None


@pytest.fixture
def far(proxy: Proxy, keys: Keys, raw: redis.Redis, max_backlog: int | None) -> Any:
    raw.script_load(APPEND.source)  # so that a lost EVALSHA is the append itself
    policy = Policy(give_up_s=5.0, max_backlog=max_backlog)
    with Client(proxy.url, prefix=keys.prefix, queue=keys.queue, policy=policy) as client:
        yield client


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("command", "max_backlog"),
    [
        *((command, None) for command in (b"TIME", b"EVALSHA", b"XADD")),
        *((command, 9) for command in (b"XRANGE", b"XLEN", b"TIME", b"EVALSHA", b"XADD")),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_reply_changes_nothing(
    far: Client, proxy: Proxy, raw: redis.Redis, keys: Keys, command: bytes, before: bool, count: int
) -> None:
    loss = proxy.lose_reply(command, before=before, count=count)
    assert far.submit("Hello", id="a").added
    # what was written before its reply was lost is found, and not written again
    assert loss.num_lost == (1 if command == b"EVALSHA" and not before else count)
    jobs = jobs_of(raw, keys)
    assert len(jobs) == (1 + count if command == b"XADD" and not before else 1)
    assert all(fields == jobs[0] for fields in jobs)
    assert raw.xlen(keys.out("a")) == 1


def test_a_reply_lost_while_looking_again_changes_nothing(
    far: Client, proxy: Proxy, raw: redis.Redis, keys: Keys
) -> None:
    losses = [proxy.lose_reply(command) for command in (b"EVALSHA", b"XRANGE")]
    assert far.submit("Hello", id="a").added
    assert [loss.num_lost for loss in losses] == [1, 1]
    assert len(jobs_of(raw, keys)) == raw.xlen(keys.out("a")) == 1


@pytest.mark.parametrize("before", [False, True])
def test_a_reply_lost_by_the_second_call_for_a_request(
    far: Client, proxy: Proxy, raw: redis.Redis, keys: Keys, before: bool
) -> None:
    assert far.submit("Hello", id="a").added
    for command in (b"TIME", b"EVALSHA", b"XRANGE"):
        loss = proxy.lose_reply(command, before=before)
        assert not far.submit("Hello", id="a").added
        assert loss.num_lost == 1
    with pytest.raises(ConflictError):
        far.submit("Goodbye", id="a")
    assert len(jobs_of(raw, keys)) == raw.xlen(keys.out("a")) == 1


def test_no_second_job_if_a_worker_has_begun_while_the_reply_was_lost(
    far: Client, proxy: Proxy, raw: redis.Redis, keys: Keys, work: Callable[..., HandWorker]
) -> None:
    proxy.lose_reply(b"XADD")
    # Between the lost reply and the next look the worker begins: it waits for the job's own entry.
    begun = threading.Thread(target=lambda: (raw.xread({keys.jobs(): "0"}, block=5000), work("a").start()))
    begun.start()
    far.submit("Hello", id="a")
    begun.join()
    assert 1 <= len(jobs_of(raw, keys)) <= 2
    assert raw.xlen(keys.out("a")) == 2


def test_two_calls_at_once_are_one_request(server: Server, raw: redis.Redis, keys: Keys) -> None:
    added: list[bool] = []

    def call() -> None:
        with Client(server.url, prefix=keys.prefix, queue=keys.queue) as client:
            added.extend(client.submit("Hello", id=f"a{number}").added for number in range(20))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(added) == 80
    assert sum(added) == 20 == len(jobs_of(raw, keys))


def test_a_server_that_has_forgotten_the_script(client: Client, raw: redis.Redis) -> None:
    raw.script_flush()
    assert client.submit("Hello").added
    assert raw.script_exists(APPEND.sha) == [True]


# --- a server that cannot ---------------------------------------------------------------------------------------------


def test_giving_up_names_the_request_and_the_same_call_later_goes_through(
    proxy: Proxy, keys: Keys, raw: redis.Redis
) -> None:
    with Client(proxy.url, prefix=keys.prefix, queue=keys.queue, policy=Policy(give_up_s=0.3)) as client:
        proxy.refuse()
        started_s = time.monotonic()
        with pytest.raises(UnavailableError) as caught:
            client.submit("Hello", id="a")
        assert time.monotonic() - started_s < 2
        assert caught.value.id == "a"
        assert not raw.exists(keys.out("a"))
        proxy.accept()
        assert client.submit("Hello", id="a").added


UNWRITABLE = [
    (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "ReadOnlyError"),
    (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), "OutOfMemoryError"),
    (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
        "NOREPLICAS",
    ),
]


@pytest.mark.parametrize(("spoil", "mend", "word"), UNWRITABLE)
def test_what_passes_is_waited_for(own_server: Callable[..., Server], spoil: Any, mend: Any, word: str) -> None:
    server = own_server()
    raw = server.client()
    raw.execute_command(*spoil)
    with Client(server.url, policy=Policy(give_up_s=0.2)) as client, pytest.raises(UnavailableError, match=word):
        client.submit("Hello", id="a")
    timer = threading.Timer(0.3, lambda: raw.execute_command(*mend))
    timer.start()
    with Client(server.url, policy=Policy(give_up_s=10)) as client:
        assert client.submit("Hello", id="a").added
    timer.join()
    raw.close()


@pytest.mark.parametrize("spoil", [spoil for spoil, _, _ in UNWRITABLE])
def test_a_request_that_is_there_is_found_where_nothing_can_be_written(
    own_server: Callable[..., Server], spoil: Any
) -> None:
    server = own_server()
    with Client(server.url, policy=Policy(give_up_s=0.2)) as client, server.client() as raw:
        assert client.submit("Hello", id="a").added
        raw.execute_command(*spoil)
        assert not client.submit("Hello", id="a").added
        with pytest.raises(ConflictError):
            client.submit("Goodbye", id="a")


def test_what_does_not_pass_is_an_error_at_once(client: Client, raw: redis.Redis, keys: Keys) -> None:
    raw.set(keys.out("a"), "no stream", px=60_000)
    with pytest.raises(ServerError, match="WRONGTYPE"):
        client.submit("Hello", id="a")


def test_handles_lead_on(client: Client, work: Callable[..., HandWorker]) -> None:
    handle = client.submit("Hello")
    worker = work(handle.id)
    worker.start()
    assert handle.cancel() == "requested"
    worker.finish("cancelled")
    assert handle.result().reason == "cancelled"
    with handle.stream() as stream:
        assert isinstance(list(stream)[-1], Finished)


@pytest.mark.parametrize("fmt", ["msgpack", "json"])
@pytest.mark.parametrize("options", [{"temperature": 10**400}, {"min_p": -(10**400)}, {"logit_bias": {3: 10**400}}])
def test_a_number_beyond_all_floats_is_refused_by_name(client: Client, fmt: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidJobError) as caught:
        client.submit("a", fmt=fmt, **options)
    assert caught.value.param == next(iter(options))
