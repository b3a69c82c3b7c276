"""Following a stream: late, twice, over lost connections and servers, from a kept cursor; and what must not pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from headrace.clients import (
    ChangedError,
    Client,
    ConfigError,
    ErrorInfo,
    Event,
    ExpiredError,
    Finished,
    GapError,
    Keys,
    MalformedEntryError,
    Queued,
    RequestFailedError,
    RewoundError,
    Started,
    Tokens,
    WaitTimeoutError,
)
from headrace.clients.lua import APPEND
from tests.clients.hand_worker import HandWorker
from tests.support.proxy import Proxy
from tests.support.server import Server

END = {"e": "finished", "reason": "stop", "done": True}


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens | Finished))


@pytest.fixture
def finished(work: Callable[..., HandWorker], client: Client) -> HandWorker:
    """Request `a`: two attempts, five tokens and a last chunk."""
    client.submit("Hello", id="a")
    worker = work("a")
    worker.start()
    worker.tokens("He")
    worker.tokens("l")
    worker.release()
    worker.start()
    worker.tokens("lo")
    worker.finish(text="!")
    return worker


def test_a_reader_that_comes_late_sees_all_and_so_does_the_next(client: Client, finished: HandWorker) -> None:
    for _ in range(2):
        with client.stream("a", timeout_s=5) as stream:
            events = list(stream)
        kinds = [type(event).__name__ for event in events]
        assert kinds == ["Queued", "Started", "Tokens", "Tokens", "Released", "Started", "Tokens", "Finished"]
        assert text_of(events) == "Hello!"
        assert list(stream) == []


def test_readers_beside_a_worker_see_all_as_it_comes(client: Client, work: Callable[..., HandWorker]) -> None:
    seen: list[list[Event]] = [[], [], []]

    def read(into: list[Event]) -> None:
        with client.stream("a", timeout_s=10) as stream:
            into.extend(stream)

    threads = [threading.Thread(target=read, args=(into,)) for into in seen]
    for thread in threads:
        thread.start()  # before there is a stream
    worker = work("a")
    worker.start()
    for character in "streamed":
        worker.tokens(character)
        time.sleep(0.005)
    worker.finish()
    for thread in threads:
        thread.join()
    assert [text_of(events) for events in seen] == ["streamed"] * 3


def test_readers_that_start_at_any_moment_see_the_first_token(client: Client, work: Callable[..., HandWorker]) -> None:
    texts: dict[str, str] = {}

    def follow(request_id: str, after_s: float) -> None:
        time.sleep(after_s)
        texts[request_id] = client.result(request_id, timeout_s=10).text

    threads = [threading.Thread(target=follow, args=(f"a{number}", number * 0.002)) for number in range(40)]
    for thread in threads:
        thread.start()
    for number in range(40):
        worker = work(f"a{number}")
        worker.start()
        worker.finish(text="1")
    for thread in threads:
        thread.join()
    assert texts == {f"a{number}": "1" for number in range(40)}


def test_an_event_comes_at_once(client: Client, work: Callable[..., HandWorker]) -> None:
    worker = work("a")
    worker.start()
    with client.stream("a", timeout_s=10) as stream:
        next(stream)
        threading.Timer(0.1, lambda: worker.tokens("x")).start()
        started_s = time.monotonic()
        assert isinstance(next(stream), Tokens)
        assert time.monotonic() - started_s < 1


def test_a_kept_cursor_goes_on_from_anywhere(client: Client, finished: HandWorker) -> None:
    with client.stream("a", timeout_s=5) as stream:
        whole = [(event, stream.cursor) for event in stream]
    for place, (_, cursor) in enumerate(whole):
        with client.stream("a", cursor, timeout_s=5) as stream:
            assert list(stream) == [event for event, _ in whole[place + 1 :]]


def test_the_cursor_is_behind_what_was_given_not_what_was_fetched(client: Client, finished: HandWorker) -> None:
    with client.stream("a", timeout_s=5) as stream:
        given = [next(stream) for _ in range(3)]
        cursor = stream.cursor
    with client.stream("a", cursor, timeout_s=5) as stream:
        assert text_of(given + list(stream)) == "Hello!"


def test_a_stream_that_was_closed_goes_on_where_it_stood(client: Client, finished: HandWorker) -> None:
    stream = client.stream("a", timeout_s=5)
    events = []
    for event in stream:
        events.append(event)
        stream.close()
    assert text_of(events) == "Hello!"
    assert len(events) == 8


def test_a_cursor_that_cannot_be(client: Client) -> None:
    with pytest.raises(ConfigError):
        client.stream("a", "nonsense")
    with pytest.raises(ConfigError):
        client.stream("a b")


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_failure_is_raised_with_its_data(client: Client, work: Callable[..., HandWorker]) -> None:
    worker = work("a")
    worker.start()
    worker.tokens("x")
    worker.finish("error", "y", error=ErrorInfo("unsupported", "not built yet", "response_format"))
    stream = client.stream("a", timeout_s=5)
    with pytest.raises(RequestFailedError) as caught, stream:
        list(stream)
    error = caught.value
    assert (error.id, error.code, error.message, error.param) == (
        "a",
        "unsupported",
        "not built yet",
        "response_format",
    )
    assert error.event is not None
    assert error.event.text == "y"
    assert list(stream) == []
    with pytest.raises(RequestFailedError) as caught:
        client.result("a")
    assert caught.value.result is not None
    assert (caught.value.result.text, caught.value.result.reason) == ("xy", "error")
    result = client.result("a", raise_on_error=False)
    assert result == caught.value.result
    with client.stream("a", timeout_s=5, raise_on_error=False) as stream:
        assert isinstance(list(stream)[-1], Finished)


def test_a_result_of_several_choices(client: Client, work: Callable[..., HandWorker]) -> None:
    worker = work("a", kind="json")
    worker.start((0, 0), metadata={"a": 1})
    worker.tokens("one", prompt_logprobs=(None, ((4, -1.0),)))
    lp = (((5, -0.25), (6, -2.0)),)
    for fields in (
        {"e": "tokens", "i": 0, "t": [5], "x": "t", "c": 1, "lp": lp},
        {"e": "finished", "c": 1, "i": 1, "t": [6, 7], "x": "wo", "lp": [lp[0], lp[0]], "reason": "stop", "stop": "!"},
        {"e": "finished", "reason": "length", "done": True, "usage": {"prompt": 2, "completion": 6, "cached": 1}},
    ):
        assert worker.append(fields, worker.next(), 60_000)
    result = client.result("a", timeout_s=5)
    first, second = result.choices
    assert (first.text, first.token_ids, first.reason, first.stop) == ("one", tuple(map(ord, "one")), "length", None)
    assert (second.text, second.token_ids, second.reason, second.stop) == ("two", (5, 6, 7), "stop", "!")
    assert second.logprobs == lp * 3
    assert first.logprobs is None
    assert (result.text, result.token_ids, result.reason) == (first.text, first.token_ids, first.reason)
    assert result.prompt_logprobs == (None, ((4, -1.0),))
    assert (result.usage.completion, result.seed, result.metadata, result.attempts) == (6, 7, {"a": 1}, 1)
    assert result.model is not None
    assert result.model.name == "scripted"


def test_a_result_of_a_request_that_did_not_stream(client: Client, work: Callable[..., HandWorker]) -> None:
    worker = work("a")
    worker.start()
    worker.finish(text="all at once")
    assert client.result("a", timeout_s=5).text == "all at once"


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_an_id_that_nobody_knows_is_waited_for_as_long_as_one_likes(client: Client) -> None:
    for timeout_s in (0, 0.2):
        started_s = time.monotonic()
        with pytest.raises(WaitTimeoutError) as caught, client.stream("a", timeout_s=timeout_s) as stream:
            next(stream)
        assert timeout_s <= time.monotonic() - started_s < timeout_s + 1
        assert (caught.value.seen, caught.value.cursor, caught.value.lost) == (False, "", None)
        assert isinstance(caught.value, TimeoutError)


def test_a_limit_of_nothing_still_reads_what_is_there(client: Client, finished: HandWorker) -> None:
    with client.stream("a", timeout_s=0) as stream:
        assert text_of(list(stream)) == "Hello!"


def test_the_limit_of_a_stream_is_for_each_entry_and_after_it_one_may_go_on(
    client: Client, work: Callable[..., HandWorker]
) -> None:
    worker = work("a")
    worker.start()
    with client.stream("a", timeout_s=0.3) as stream:
        next(stream)
        for character in "abc":
            threading.Timer(0.15, lambda character=character: worker.tokens(character)).start()
            assert next(stream).text == character
        with pytest.raises(WaitTimeoutError) as caught:
            next(stream)
        assert caught.value.seen
        assert caught.value.cursor == stream.cursor
        worker.finish(text="d")
        assert next(stream).text == "d"


def test_the_limit_of_a_result_is_for_the_whole(client: Client, work: Callable[..., HandWorker]) -> None:
    worker = work("a")
    worker.start()
    over = threading.Event()

    def dribble() -> None:
        while not over.wait(0.05):
            worker.tokens("x")

    thread = threading.Thread(target=dribble)
    thread.start()
    started_s = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        client.result("a", timeout_s=0.4)
    assert 0.4 <= time.monotonic() - started_s < 1.5
    over.set()
    thread.join()


def test_a_stream_that_was_there_and_is_gone_has_expired(
    server: Server, client: Client, raw: redis.Redis, keys: Keys, work: Callable[..., HandWorker]
) -> None:
    worker = work("a")
    worker.start()
    own = redis.Redis.from_url(server.url, socket_timeout=0.4)  # so that a read blocks for 0.2 s
    with own, Client(own, prefix=keys.prefix, queue=keys.queue).stream("a", timeout_s=20) as stream:
        next(stream)
        threading.Timer(0.1, lambda: raw.delete(keys.out("a"))).start()
        with pytest.raises(ExpiredError):
            next(stream)
    started_s = time.monotonic()
    with pytest.raises(ExpiredError), client.stream("a", stream.cursor, timeout_s=20) as later:
        next(later)
    assert time.monotonic() - started_s < 1  # with a cursor, it is known at once


# --- what must not pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"e": "tokens", "i": 4, "t": [1]}, GapError),
        ({"e": "tokens", "i": 2, "t": [1]}, RewoundError),
        ({"e": "tokens", "i": 0, "t": [1]}, RewoundError),
        ({**END, "usage": {"prompt": 1, "completion": 2, "cached": 0}}, RewoundError),
        ({**END, "usage": {"prompt": 1, "completion": 4, "cached": 0}}, GapError),
        ({"e": "queued", "fp": "0" * 64}, ChangedError),
        ({"e": "tokens"}, MalformedEntryError),
    ],
)
def test_what_does_not_follow_is_an_error_after_what_did(
    client: Client, work: Callable[..., HandWorker], fields: dict[str, Any], kind: type[Exception]
) -> None:
    worker = work("a")
    worker.start()
    worker.tokens("abc")
    worker.append(fields, worker.next(), 0)
    with client.stream("a", timeout_s=5) as stream:
        assert [type(next(stream)) for _ in range(2)] == [Started, Tokens]
        for _ in range(2):  # and stays one
            with pytest.raises(kind):
                next(stream)


@pytest.mark.parametrize(("fp", "kind"), [("f" * 64, RewoundError), ("0" * 64, ChangedError)])
@pytest.mark.parametrize("reading", [False, True])
def test_a_stream_that_was_made_anew_is_never_followed_in_silence(
    client: Client,
    raw: redis.Redis,
    keys: Keys,
    work: Callable[..., HandWorker],
    fp: str,
    kind: type[Exception],
    reading: bool,
) -> None:
    worker = work("a")
    worker.start()
    worker.tokens("abc")
    stream = client.stream("a", timeout_s=5)
    assert len([next(stream), next(stream)]) == 2
    if not reading:  # a reader that comes back later, with its cursor
        stream.close()
        stream = client.stream("a", stream.cursor, timeout_s=5)
        kind = RewoundError
    raw.delete(keys.out("a"))
    again = work("a", fp=fp)
    again.start()
    again.tokens("abcdef")
    with pytest.raises(kind), stream:
        next(stream)


# --- lost connections -------------------------------------------------------------------------------------------------


def kill_connections(raw: redis.Redis) -> None:
    raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def test_connections_killed_at_every_turn_lose_and_repeat_nothing(own_server: Callable[..., Server]) -> None:
    server, keys = own_server(), Keys()
    raw = server.client()
    worker = HandWorker(raw, keys, "a")
    worker.start()
    seen: list[Event] = []

    def read() -> None:
        with Client(server.url) as client, client.stream("a", timeout_s=10) as stream:
            seen.extend(stream)

    reading = threading.Thread(target=read)
    reading.start()
    for number, character in enumerate("never twice, never a gap"):
        worker.tokens(character)
        if number % 3 == 0:
            kill_connections(raw)
            time.sleep(0.02)
    worker.finish()
    reading.join()
    raw.close()
    assert text_of(seen) == "never twice, never a gap"


@pytest.mark.parametrize("before", [False, True])
def test_a_lost_reply_of_a_read(
    server: Server, proxy_to: Callable[..., Proxy], keys: Keys, finished: HandWorker, before: bool
) -> None:
    proxy = proxy_to(server)
    loss = proxy.lose_reply(b"XREAD", count=2, before=before)
    with Client(proxy.url, prefix=keys.prefix, queue=keys.queue) as client:
        assert client.result("a", timeout_s=10).text == "Hello!"
    assert loss.num_lost == 2


def test_a_server_out_of_reach_is_said_when_the_limit_is_over(
    server: Server, proxy_to: Callable[..., Proxy], keys: Keys
) -> None:
    proxy = proxy_to(server)
    proxy.refuse()
    with Client(proxy.url, prefix=keys.prefix, queue=keys.queue) as client:
        with pytest.raises(WaitTimeoutError) as caught:
            client.result("a", timeout_s=0.3)
        assert caught.value.lost is not None
        assert "ConnectionError" in caught.value.lost


def test_a_server_that_restarts_with_what_it_had(own_server: Callable[..., Server]) -> None:
    server, keys = own_server(appendonly=True), Keys()
    raw = server.client()
    worker = HandWorker(raw, keys, "a")
    worker.start()
    worker.tokens("before ")
    with Client(server.url) as client, client.stream("a", timeout_s=20) as stream:
        events = [next(stream), next(stream)]
        server.restart()
        worker.tokens("after")
        worker.finish()
        events += stream
    raw.close()
    assert text_of(events) == "before after"


def test_a_server_that_hangs_is_left_and_found_again(own_server: Callable[..., Server]) -> None:
    server, keys = own_server(), Keys()
    raw = server.client()
    worker = HandWorker(raw, keys, "a")
    worker.start()
    # a client of the caller's, with a short limit of its own
    with (
        redis.Redis.from_url(server.url, socket_timeout=0.2, retry=None) as own,
        Client(own).stream("a", timeout_s=20) as stream,
    ):
        next(stream)
        server.freeze()
        threading.Timer(0.6, server.thaw).start()
        later = threading.Timer(0.8, lambda: worker.tokens("x"))
        later.start()
        assert next(stream).text == "x"
        later.join()
    raw.close()


class LostEnd:
    """A server that has lost the end of request `a`'s stream in a failover: what is left is as it was."""

    def __init__(self, raw: redis.Redis, keys: Keys) -> None:
        self.raw, self.keys = raw, keys

    def lose(self, num_entries: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        out = self.keys.out("a")
        kept = self.raw.xrange(out)
        self.raw.delete(out)
        newest = ""
        for at, fields in kept[:-num_entries]:
            self.append(newest, at, fields)
            newest = at.decode()
        return kept[-num_entries:]

    def append(self, newest: str, at: bytes, fields: dict[bytes, bytes]) -> None:
        ((field, payload),) = fields.items()
        keys = (self.keys.out("a"), self.keys.cancel("a"))
        assert self.raw.eval(APPEND.source, 2, *keys, newest, at, field, payload, 60_000, "0")[0] == 1


def test_an_end_that_was_lost_is_waited_for_until_the_worker_writes_it_again(
    client: Client, raw: redis.Redis, keys: Keys, work: Callable[..., HandWorker]
) -> None:
    worker = work("a")
    worker.start()
    worker.tokens("abc")
    worker.tokens("def")
    stream = client.stream("a", timeout_s=5)
    events = [next(stream) for _ in range(3)]
    stream.close()  # the connection to the old server is gone
    server = LostEnd(raw, keys)
    (lost,) = server.lose(1)
    again = threading.Timer(0.2, lambda: (server.append(worker.newest.replace("-2", "-1"), *lost), worker.finish()))
    again.start()
    events += stream
    assert text_of(events) == "abcdef"
    assert len(events) == 4


def test_an_end_that_was_lost_with_its_worker_is_an_error(
    client: Client, raw: redis.Redis, keys: Keys, work: Callable[..., HandWorker]
) -> None:
    worker = work("a")
    worker.start()
    worker.tokens("abc")
    worker.tokens("def")
    with client.stream("a", timeout_s=5) as stream:
        assert len([next(stream) for _ in range(3)]) == 3
        LostEnd(raw, keys).lose(1)
        other = work("a", fp="f" * 64)
        other.newest, other.count = worker.newest.replace("-2", "-1"), 3
        other.start()
        with pytest.raises(RewoundError) as caught:
            next(stream)
        assert (caught.value.expected, caught.value.found) == (6, 3)


def test_after_a_reconnect_it_is_looked_whether_the_last_entry_is_still_there(
    server: Server, proxy_to: Callable[..., Proxy], raw: redis.Redis, keys: Keys, work: Callable[..., HandWorker]
) -> None:
    worker = work("a")
    worker.start()
    worker.tokens("abc")
    worker.release()
    proxy = proxy_to(server)
    with Client(proxy.url, prefix=keys.prefix, queue=keys.queue) as client, client.stream("a", timeout_s=5) as stream:
        assert len([next(stream) for _ in range(3)]) == 3
        proxy.refuse()
        LostEnd(raw, keys).lose(1)  # `released`: the counts alone would not tell
        other = work("a", fp="f" * 64)
        other.newest, other.count = worker.newest.replace("-2", "-1"), 3
        other.start()
        proxy.accept()
        with pytest.raises(RewoundError, match="no longer there"):
            next(stream)


def test_streams_give_their_connections_back(server: Server, keys: Keys, finished: HandWorker) -> None:
    pool = redis.BlockingConnectionPool.from_url(server.url, max_connections=2, timeout=1)
    client = Client(redis.Redis(connection_pool=pool), prefix=keys.prefix, queue=keys.queue)
    kept = []  # so that nothing is given back by being collected
    for _ in range(5):
        with client.stream("a", timeout_s=5) as stream:
            assert isinstance(next(stream), Queued)  # left in the middle
        kept.append(stream)
        stream = client.stream("unknown", timeout_s=0.01)
        with pytest.raises(WaitTimeoutError):
            next(stream)
        kept.append(stream)
        stream = client.stream("a", timeout_s=5)
        assert text_of(list(stream)) == "Hello!"  # read to its end, without `with`
        kept.append(stream)
    assert client.result("a", timeout_s=5).text == "Hello!"
    pool.disconnect()
