"""A producer's and a reader's user: the rights of deploy/acl suffice, and without any one of them something fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from headrace.clients import Client, Keys, Policy, QueueFullError, ServerError
from tests.clients.hand_worker import HandWorker
from tests.support.acl import rights_in, set_user, url_of
from tests.support.command import Outcome
from tests.support.server import Server

KEYS = Keys("headrace", "default")
Call = Callable[..., Outcome]


def produce(port: int, raw: redis.Redis, call: Call) -> None:
    """Submit, submit again, cancel what is queued, what runs and what nobody knows; refuse what is too much."""
    url = url_of("producer", port)
    with Client(url, policy=Policy(max_backlog=3, give_up_s=1.0)) as client:
        handle = client.submit("Hello", id="a")
        assert not client.submit("Hello", id="a").added
        HandWorker(raw, KEYS, "a").start()
        assert handle.cancel() == "requested"
        assert raw.pttl(KEYS.cancel("a")) > 0
        assert client.cancel("nobody-knows") == "unknown"
        assert client.submit("Hello", id="b").cancel() == "cancelled"
        raw.xgroup_create(KEYS.jobs(), "workers", id="0")
        client.submit("Hello", id="c")
        with pytest.raises(QueueFullError):
            client.submit("Hello", id="d")
    outcome = call("submit", "Hello", "--id", "e", "--detach", "--redis-url", url)
    if outcome.code:
        raise ServerError(outcome.line)


def read(port: int, raw: redis.Redis, call: Call) -> None:
    """Follow an answer that pauses, and read it again at once."""
    url = url_of("reader", port)
    raw.xadd(KEYS.out("a"), {"json": '{"e": "queued", "fp": "%s"}' % ("0" * 64)}, id="0-1")
    raw.pexpire(KEYS.out("a"), 60_000)
    worker = HandWorker(raw, KEYS, "a")
    worker.start()
    with Client(url + "?socket_timeout=0.1") as client, client.stream("a", timeout_s=0.3) as stream:
        next(stream)
        next(stream)
        with pytest.raises(TimeoutError):  # it asks meanwhile whether the stream is still there
            next(stream)
        worker.finish(text="abc")
        assert next(stream).text == "abc"
        assert client.result("a", timeout_s=1).text == "abc"
    outcome = call("tail", "a", "--redis-url", url, "--timeout", "1s")
    if outcome.code:
        raise ServerError(outcome.line)
    assert outcome.out == "abc\n"


FLOWS = {"producer": produce, "reader": read}


@pytest.mark.parametrize("name", FLOWS)
def test_they_suffice_and_none_is_one_too_many(each_server: Server, call: Call, name: str) -> None:
    rights, flow = rights_in(name), FLOWS[name]
    with each_server.client() as raw:
        for missing in (None, *rights):
            raw.flushall()
            raw.script_flush()
            set_user(raw, name, [right for right in rights if right != missing])
            if missing is None:
                raw.acl_log_reset()
                flow(each_server.port, raw, call)
                assert raw.acl_log() == []
            else:
                with pytest.raises(ServerError, match=r"(?i)permission|ACL failure|can't"):
                    flow(each_server.port, raw, call)
        raw.flushall()


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("reader", ("XADD", KEYS.out("a"), "*", "f", "v")),
        ("reader", ("XREAD", "STREAMS", KEYS.jobs(), "0")),
        ("reader", ("XREAD", "STREAMS", "other", "0")),
        ("producer", ("XREADGROUP", "GROUP", "workers", "x", "STREAMS", KEYS.jobs(), ">")),
        ("producer", ("XADD", KEYS.dead, "*", "f", "v")),
        ("worker", ("FLUSHALL",)),
        ("worker", ("XADD", "other", "*", "f", "v")),
        ("worker", ("KEYS", "*")),
    ],
)
def test_what_they_may_not(each_server: Server, name: str, command: tuple[str, ...]) -> None:
    with each_server.client() as raw:
        set_user(raw, name, rights_in(name))
    with (
        redis.Redis.from_url(url_of(name, each_server.port)) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.execute_command(*command)
