"""The client library against a real worker: what either side's tests alone cannot show."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from headrace.clients import Client, ConflictError, RequestFailedError
from headrace.clients.events import Finished, Queued, Started, Tokens
from tests.support.proxy import Proxy
from tests.support.rig import Rig
from tests.support.worker_process import WorkerProcess


@pytest.fixture
def client(rig: Rig) -> Iterator[Client]:
    with Client(rig.server.url, prefix=rig.prefix) as made:
        yield made


@pytest.mark.parametrize("fmt", ["msgpack", "json"])
def test_submit_and_stream(client: Client, rig: Rig, fmt: str) -> None:
    rig.worker(script="echo")
    handle = client.submit("one 世界 two", fmt=fmt, stop=["two"])  # type: ignore[arg-type]
    with handle.stream(timeout_s=5) as stream:
        events = list(stream)
    assert [type(event) for event in events[:2]] == [Queued, Started]
    assert "".join(event.text for event in events if isinstance(event, Tokens | Finished)) == "one 世界 "
    assert isinstance(events[-1], Finished)
    assert events[-1].stop == "two"


def test_results_of_many_at_once(client: Client, rig: Rig) -> None:
    rig.worker()
    handles = [client.submit(f"Hello {number}", max_tokens=10, ignore_eos=True, n=2) for number in range(20)]
    results = [handle.result(timeout_s=10) for handle in handles]
    assert all(len(choice.token_ids) == 10 for result in results for choice in result.choices)


def test_a_refusal_names_the_field(client: Client, rig: Rig) -> None:
    rig.worker()
    with pytest.raises(RequestFailedError) as caught:
        client.submit("x", stop_token_ids=[10_000]).result(timeout_s=5)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "stop_token_ids")


def test_cancel_queued_running_and_done(client: Client, rig: Rig) -> None:
    queued = client.submit("x", max_tokens=500, ignore_eos=True)
    queued.cancel()
    rig.worker(step_time_s=0.01)
    running = client.submit("x", max_tokens=500, ignore_eos=True)
    rig.wait_tokens(running.id, 3)
    running.cancel()
    for handle in (queued, running):
        assert handle.result(timeout_s=5, raise_on_error=False).choices[0].reason == "cancelled"
    assert rig.started(queued.id) == []
    done = client.submit("x", max_tokens=1)
    done.result(timeout_s=5)
    done.cancel()
    rig.wait_empty()


def test_the_same_id_twice_is_one_request(client: Client, rig: Rig) -> None:
    rig.worker()
    one = client.submit("x", id="same", max_tokens=5, ignore_eos=True)
    first = one.result(timeout_s=5)
    two = client.submit("x", id="same", max_tokens=5, ignore_eos=True)
    assert two.result(timeout_s=5).choices[0].token_ids == first.choices[0].token_ids
    assert len(rig.started("same")) == 1
    with pytest.raises(ConflictError):
        client.submit("another", id="same", max_tokens=5)


def test_a_reader_sees_a_killed_and_resumed_request_as_one_answer(
    start_worker: Callable[..., WorkerProcess], client: Client, rig: Rig
) -> None:
    first = start_worker(rig.server, rig.prefix, step_time_s=0.02, lease_s=0.6)
    handle = client.submit("x", max_tokens=40, seed=1, ignore_eos=True)
    seen: list[int] = []

    def read() -> None:
        with handle.stream(timeout_s=15) as stream:
            for event in stream:
                if isinstance(event, Tokens | Finished):
                    seen.extend(event.token_ids)

    reader = threading.Thread(target=read)
    reader.start()
    rig.wait_tokens(handle.id, 8)
    first.kill()
    rig.worker(lease_s=0.6)
    reader.join(15)
    assert len(seen) == 40
    assert seen == rig.told(handle.id)[0].token_ids
    assert len(rig.started(handle.id)) == 2


def test_a_worker_behind_a_bad_line(proxy_to: Callable[..., Proxy], client: Client, rig: Rig) -> None:
    proxy = proxy_to(rig.server)
    rig.worker(url=proxy.url, step_time_s=0.003)
    proxy.delay_s = 0.005
    handles = [client.submit(f"x{number}", max_tokens=30, ignore_eos=True) for number in range(8)]
    for _ in range(4):
        proxy.cut()
        threading.Event().wait(0.1)
    assert all(len(handle.result(timeout_s=15).choices[0].token_ids) == 30 for handle in handles)
