"""What the tests of the client share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import settings

from headrace.clients import Client, Keys, Policy
from tests.clients.hand_worker import HandWorker
from tests.support.proxy import proxy_to  # noqa: F401  (a fixture)
from tests.support.server import Server, redis_binary, start_server

settings.register_profile("clients", deadline=None)  # the machine may be busy
settings.load_profile("clients")


@pytest.fixture(scope="session", params=["valkey", "redis"])
def each_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Valkey, and Redis where one is installed."""
    binary = redis_binary() if request.param == "redis" else None
    if request.param == "redis" and binary is None:
        pytest.skip("no Redis on this machine")
    started = start_server(tmp_path_factory.mktemp("each"), binary=binary)
    yield started
    started.stop()


@pytest.fixture
def raw(server: Server) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
def keys(prefix: str, queue: str) -> Keys:
    return Keys(prefix, queue)


@pytest.fixture
def client(server: Server, keys: Keys) -> Iterator[Client]:
    with Client(server.url, prefix=keys.prefix, queue=keys.queue, policy=Policy(give_up_s=5.0)) as made:
        yield made


@pytest.fixture
def work(raw: redis.Redis, keys: Keys) -> Callable[..., HandWorker]:
    """`work(request_id, …)`: a worker by hand for that request."""
    return lambda request_id, *args, **more: HandWorker(raw, keys, request_id, *args, **more)


@pytest.fixture(autouse=True)
def no_key_without_ttl(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test with a server: only the jobs streams and `dead` may be without a time to live."""
    if "raw" not in request.fixturenames or "keys" not in request.fixturenames:
        yield
        return
    server: redis.Redis = request.getfixturevalue("raw")
    keys: Keys = request.getfixturevalue("keys")
    yield
    for key in server.scan_iter(match=f"{keys.prefix}:*", count=1000):
        may_stay = key.decode() in (*keys.all_jobs, keys.dead)
        assert may_stay or server.pttl(key) > 0, f"{key.decode()} has no time to live"


@pytest.fixture
def scripts_folder() -> Path:
    return Path(__file__).resolve().parents[2] / "clients" / "scripts"
