"""Options and fixtures of the chaos suite.

--chaos-size short|full     how much: what `make test` can bear (the default), or what `make chaos` runs
--chaos-seed N              what random choices are made from; a run says which it used
"""

from __future__ import annotations

import random
import secrets
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from tests.support.chaos_monitor import Monitor
from tests.support.chaos_queue import ChaosQueue
from tests.support.chaos_workers import Nursery, Worker
from tests.support.proxy import proxy_to
from tests.support.server import Server

__all__ = ["proxy_to"]
_SHORT_SEED = 1
_SEED = pytest.StashKey[int]()
_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--chaos-size", choices=("short", "full"), default="short", help="how much of the chaos suite")
    group.addoption("--chaos-seed", type=int, default=None, help="what its random choices are made from")


def _size(config: pytest.Config) -> str:
    return str(config.getoption("--chaos-size", "short"))


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--chaos-seed", None)
    of_controller = getattr(config, "workerinput", {}).get("chaos_seed")  # several processes share one seed
    if of_controller is not None:
        seed = of_controller
    elif seed is None:
        seed = _SHORT_SEED if _size(config) == "short" else secrets.randbelow(10**6)
    config.stash[_SEED] = seed
    config.addinivalue_line("markers", "full_size: part of the full size of the chaos suite only")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["chaos_seed"] = node.config.stash[_SEED]


def pytest_sessionstart(session: pytest.Session) -> None:
    if _size(session.config) == "full" and not hasattr(session.config, "workerinput"):
        sys.stderr.write(f"chaos: seed {session.config.stash[_SEED]} (again with SEED={session.config.stash[_SEED]})\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _size(config) == "short":
        for item in items:
            if item.get_closest_marker("full_size"):
                item.add_marker(pytest.mark.skip(reason="in `make chaos` only"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """What all random choices are made from."""
    return pytestconfig.stash.get(_SEED, _SHORT_SEED)


@pytest.fixture
def chance(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """Random choices of this test."""
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def is_full(pytestconfig: pytest.Config) -> bool:
    """Whether this is the full size."""
    return _size(pytestconfig) == "full"


@pytest.fixture
def progress(request: pytest.FixtureRequest, is_full: bool) -> Iterator[Callable[[str], None]]:
    """`progress(text)`: in a full run, a line about how far the test is; each test has one when it begins and ends."""
    begun_s = time.monotonic()

    def tell(text: str) -> None:
        if is_full:
            sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {request.node.name}: {text}\n")

    tell("begins")
    yield tell
    tell(f"ends after {time.monotonic() - begun_s:.1f} s")


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The program that forks workers; one for the whole run."""
    started = Nursery(tmp_path_factory.mktemp("workers"))
    yield started
    started.close()


@pytest.fixture
def spawn(nursery: Nursery, prefix: str, progress: Callable[[str], None]) -> Iterator[Callable[..., Worker]]:
    """`spawn(server_or_proxy, **options)`: a worker on the queue `default` under `prefix`; it ends with the test."""
    started: list[Worker] = []

    def start(server: Any, **options: Any) -> Worker:
        started.append(nursery.spawn(server.url, prefix, **options))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def queue_on(
    prefix: str, chance: random.Random, request: pytest.FixtureRequest
) -> Iterator[Callable[[Server], ChaosQueue]]:
    """`queue_on(server)`: the queue `default` under `prefix`. A test must ask for its verdict (`judge`) in the end."""
    made: list[ChaosQueue] = []

    def make(server: Server) -> ChaosQueue:
        made.append(ChaosQueue(server, prefix, chance))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert each.judged or not request.node.stash.get(_PASSED, False), "the test ended without a verdict"


@pytest.fixture
def chaos_queue(server: Server, queue_on: Callable[[Server], ChaosQueue]) -> ChaosQueue:
    """A queue on the server that all tests share."""
    return queue_on(server)


@pytest.fixture
def monitor_of() -> Iterator[Callable[[Server], Monitor]]:
    """`monitor_of(server)`: everything that a server is told from now on."""
    made: list[Monitor] = []

    def make(server: Server) -> Monitor:
        made.append(Monitor(server))
        return made[-1]

    yield make
    for each in made:
        each.close()
