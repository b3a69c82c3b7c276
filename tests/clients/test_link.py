"""How the client talks to Redis: which clients it takes, what it asks of its own, what it never says in a message."""

from __future__ import annotations

import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis import asyncio as aio
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from headrace.clients import AsyncClient, Client, ConfigError, Keys, Policy, QueueFullError, ServerError
from headrace.clients.link import told_apart
from headrace.clients.steps import LostReplyError
from headrace.worker.embedded import find_binary
from tests.clients.hand_worker import HandWorker
from tests.support.server import Server, free_port, start_server


def whole_round(client: Client, raw: redis.Redis, keys: Keys, request_id: str) -> None:
    """Everything a client does, once."""
    handle = client.submit("Hello", id=request_id)
    assert handle.added
    assert not client.submit("Hello", id=request_id).added
    worker = HandWorker(raw, keys, request_id)
    with handle.stream(timeout_s=5) as stream:
        next(stream)
        worker.start()
        next(stream)
        worker.tokens("abc")
        next(stream)
        assert handle.cancel() == "requested"
        worker.finish("cancelled", "d")
        assert next(stream).text == "d"
    assert handle.result(timeout_s=5).text == "abcd"
    assert handle.cancel() == "already finished"
    assert client.submit("Hello").cancel() == "cancelled"
    assert client.cancel(request_id + "-unknown") == "unknown"
    raw.xgroup_create(keys.jobs(), "workers", id="0")
    with pytest.raises(QueueFullError):
        client.submit("Hello")


def test_a_url(each_server: Server, prefix: str) -> None:
    keys = Keys(prefix, "q")
    with Client(each_server.url, prefix=prefix, queue="q", policy=Policy(max_backlog=2)) as client:
        whole_round(client, each_server.client(), keys, "a")


@pytest.mark.parametrize("options", [{}, {"protocol": 2}, {"protocol": 3}, {"socket_timeout": None}])
def test_a_client_of_the_callers(each_server: Server, prefix: str, options: dict[str, Any]) -> None:
    keys = Keys(prefix, "q")
    with redis.Redis.from_url(each_server.url, **options) as own:
        with Client(own, prefix=prefix, queue="q", policy=Policy(max_backlog=2)) as client:
            whole_round(client, each_server.client(), keys, "a")
        assert own.ping()  # it stays open


def test_resp3_from_the_url(server: Server, keys: Keys, raw: redis.Redis) -> None:
    url = server.url + "?protocol=3"
    with Client(url, prefix=keys.prefix, queue=keys.queue, policy=Policy(max_backlog=2)) as client:
        whole_round(client, raw, keys, "a")


def test_the_master_that_a_sentinel_names(server: Server, keys: Keys, raw: redis.Redis, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "sentinel.conf"
    file.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {server.port} 1\n")
    process = subprocess.Popen([find_binary(), file, "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        sentinel = Sentinel([("127.0.0.1", port)], sentinel_kwargs={"retry": Retry(ConstantBackoff(0.05), 100)})
        client = Client(sentinel.master_for("main"), prefix=keys.prefix, queue=keys.queue, policy=Policy(max_backlog=2))
        whole_round(client, raw, keys, "a")
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A cluster of two nodes, each with half of the slots."""
    folder = tmp_path_factory.mktemp("cluster")
    # The bus port would be the port and 10,000, which may lie above all ports.
    bus_ports = [free_port(), free_port()]
    first, second = (
        start_server(folder, "--cluster-enabled", "yes", "--cluster-port", str(port)) for port in bus_ports
    )
    with first.client() as one, second.client() as other:
        one.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        other.execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
        one.execute_command("CLUSTER", "MEET", "127.0.0.1", second.port, bus_ports[1])
        while not all("cluster_state:ok" in str(node.execute_command("CLUSTER", "INFO")) for node in (one, other)):
            time.sleep(0.02)
    yield first, second
    first.stop()
    second.stop()


def test_a_cluster_in_which_queue_and_request_lie_on_different_nodes(
    cluster: tuple[Server, Server], prefix: str
) -> None:
    own = redis.RedisCluster.from_url(cluster[0].url)
    keys = Keys(prefix, "q")
    client = Client(own, prefix=keys.prefix, queue=keys.queue, policy=Policy(max_backlog=2))
    jobs_node = own.get_node_from_key(keys.jobs()).port
    request_id = next(f"a{n}" for n in range(99) if own.get_node_from_key(keys.out(f"a{n}")).port != jobs_node)
    whole_round(client, own, keys, request_id)
    own.close()
    for server in cluster:  # a round trip more for each read, were redis-py to find the node by itself
        with server.client() as raw:
            assert "getkeys" not in str(raw.info("commandstats"))


async def test_a_cluster_with_asyncio(cluster: tuple[Server, Server], prefix: str) -> None:
    keys = Keys(prefix, "q")
    async with aio.RedisCluster.from_url(cluster[0].url) as own:
        client = AsyncClient(own, prefix=keys.prefix, queue=keys.queue)
        handles = [await client.submit("Hello") for _ in range(4)]
        with redis.RedisCluster.from_url(cluster[0].url) as raw:
            for handle in handles:
                worker = HandWorker(raw, keys, handle.id)
                worker.start()
                worker.finish(text="abc")
                assert (await handle.result(timeout_s=5)).text == "abc"
                assert await handle.cancel() == "already finished"


# --- what it does not take --------------------------------------------------------------------------------------------


def test_a_client_that_decodes_replies_is_refused_at_once(server: Server) -> None:
    for client in (redis.Redis.from_url(server.url, decode_responses=True), server.url + "?decode_responses=true"):
        with pytest.raises(ConfigError, match="decode_responses") as caught:
            Client(client)
        assert caught.value.param == "target"
    with pytest.raises(ConfigError, match="decode_responses"):
        AsyncClient(aio.Redis.from_url(server.url, decode_responses=True))


def test_the_wrong_kind_of_client_is_refused(server: Server) -> None:
    for target in (aio.Redis.from_url(server.url), None, 6379, object()):
        with pytest.raises(ConfigError, match=r"redis\.Redis"):
            Client(target)
    for target in (redis.Redis.from_url(server.url), None):
        with pytest.raises(ConfigError, match=r"redis\.asyncio"):
            AsyncClient(target)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost",
        "http://:hush@x",
        "redis://user:hush@host:port/0",
        "redis://:hush@h:99999999/0",
        "redis://:hush@[x/0",
        "redis://:hush@h/0?protocol=hush",
        "redis://:hush@h/0?no_such_option=hush",
    ],
)
def test_a_url_that_is_none_is_refused_without_repeating_it(url: str) -> None:
    for kind in (Client, AsyncClient):
        try:
            client = kind(url)
        except ConfigError as error:
            assert "hush" not in "".join(traceback.format_exception(error))
        else:  # redis-py finds out at the first command
            assert "hush" not in repr(client)


def test_a_wrong_password_is_an_error_at_once_that_does_not_hold_it(own_server: Callable[..., Server]) -> None:
    server = own_server()
    with server.client() as raw:
        raw.config_set("requirepass", "right")
    for userinfo in (":wrong-hush", "someone:wrong-hush", ""):
        url = f"redis://{userinfo}@127.0.0.1:{server.port}/0"
        with Client(url, policy=Policy(give_up_s=20)) as client:
            for call in (lambda: client.submit("Hello"), lambda: client.result("a"), lambda: client.cancel("a")):
                started_s = time.monotonic()
                with pytest.raises(ServerError) as caught:
                    call()
                assert time.monotonic() - started_s < 2
                assert "hush" not in "".join(traceback.format_exception(caught.value))


def test_a_server_that_repeats_arguments_is_cut_short() -> None:
    words = "unknown command 'XADD', with args beginning with: 'headrace:{default}:jobs' '*' 'job' 'the prompt'"
    assert "prompt" not in str(told_apart(redis.ResponseError(words)))
    assert len(str(told_apart(redis.ResponseError("x" * 10_000)))) < 300


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (redis.ConnectionError("refused"), True),
        (redis.TimeoutError("slow"), True),
        (redis.BusyLoadingError("loading"), True),
        (redis.exceptions.ReadOnlyError("replica"), True),
        (redis.exceptions.OutOfMemoryError("oom"), True),
        (redis.exceptions.TryAgainError("moving"), True),
        (redis.exceptions.ClusterDownError("CLUSTERDOWN down"), True),
        (redis.exceptions.MasterDownError("MASTERDOWN link"), True),
        (redis.ResponseError("MISCONF no disk"), True),
        (redis.ResponseError("BUSY a script runs"), True),
        (redis.ResponseError("UNBLOCKED the instance has changed"), True),
        (ConnectionResetError("reset"), True),
        (redis.AuthenticationError("wrong"), False),
        (redis.ResponseError("WRONGTYPE no stream"), False),
        (redis.exceptions.NoPermissionError("acl"), False),
        (redis.DataError("no such value"), False),
    ],
)
def test_what_may_pass_and_what_will_not(error: Exception, passes: bool) -> None:
    assert isinstance(told_apart(error), LostReplyError if passes else ServerError)


def test_a_command_that_the_user_may_not_use(own_server: Callable[..., Server]) -> None:
    server = own_server()
    raw = server.client()
    raw.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@read", "+@connection")
    with (
        Client(f"redis://reader:pw@127.0.0.1:{server.port}/0") as client,
        pytest.raises(ServerError, match="permission"),
    ):
        client.submit("Hello")
    raw.close()


def test_own_connections_never_retry_by_themselves_and_block_less_than_their_limit(server: Server) -> None:
    with Client(server.url) as client:
        own = client._link._target.client()
        assert own.get_retry().get_retries() == 0
        limit_s = own.connection_pool.connection_kwargs["socket_timeout"]
        assert client._link.max_block_ms <= limit_s * 500
    for limit_s, block_ms in ((0.1, 50), (1, 500), (60, 2000), (None, 2000), (0.0001, 1)):
        with redis.Redis.from_url(server.url, socket_timeout=limit_s) as given:
            assert Client(given)._link.max_block_ms == block_ms
