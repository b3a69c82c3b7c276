"""Options and fixtures of the chaos suite.

--chaos-size short|full     how much: what `make test` can bear (the default), or what `make chaos` runs
--chaos-seed N              what random choices are made from; a run says which it used
--chaos-server NAME,...     on which kinds of servers; by default all in the full size, and in the short one Valkey,
                            with the tests marked `core` on the others too
"""

from __future__ import annotations

import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos_fleet import Fleet
from tests.support.chaos_load import make_job
from tests.support.chaos_monitor import Monitor
from tests.support.chaos_queue import ChaosQueue
from tests.support.chaos_story import Story
from tests.support.chaos_tally import Summary, book
from tests.support.chaos_traffic import Traffic
from tests.support.chaos_workers import Nursery, Worker
from tests.support.proxy import Proxy
from tests.support.server import Server, start_server
from tests.support.server_kinds import KINDS, VALKEY, ServerKind

_SHORT_SEED = 1
_SEED = pytest.StashKey[int]()
_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--chaos-size", choices=("short", "full"), default="short", help="how much of the chaos suite")
    group.addoption("--chaos-seed", type=int, default=None, help="what its random choices are made from")
    names = ",".join(kind.name for kind in KINDS)
    group.addoption("--chaos-server", default=None, metavar=names, help="on which kinds of servers")


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
    config.addinivalue_line("markers", "core: in the short size of the chaos suite on every kind of server")
    if _size(config) == "full" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(), "chaos-summary")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["chaos_seed"] = node.config.stash[_SEED]


def pytest_sessionstart(session: pytest.Session) -> None:
    if _size(session.config) == "full" and not hasattr(session.config, "workerinput"):
        sys.stderr.write(f"chaos: seed {session.config.stash[_SEED]} (again with SEED={session.config.stash[_SEED]})\n")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS], indirect=True, scope="session")


def _is_wanted(item: pytest.Item, names: str | None, *, is_short: bool) -> bool:
    kind = getattr(item, "callspec").params.get("kind") if hasattr(item, "callspec") else None  # noqa: B009
    if kind is None:
        return True
    if names is not None:
        return kind.name in names.split(",")
    return not is_short or kind is VALKEY or item.get_closest_marker("core") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_short, names = _size(config) == "short", config.getoption("--chaos-server", None)
    left_out = [item for item in items if not _is_wanted(item, names, is_short=is_short)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items if is_short else ():
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


@pytest.fixture(scope="session")
def kind(request: pytest.FixtureRequest) -> ServerKind:
    """The kind of server that the test runs on."""
    wanted: ServerKind = request.param
    if wanted.binary() is None:
        pytest.skip(f"no {wanted.name} on this machine: {wanted.to_get}")
    return wanted


@pytest.fixture(scope="session")
def server(kind: ServerKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server of each kind for the whole run; shared: use `prefix`, and do not stop or configure it."""
    started = start_server(tmp_path_factory.mktemp("server"), binary=kind.binary())
    yield started
    started.stop()


@pytest.fixture
def own_server(kind: ServerKind, tmp_path: Path, tally: Counter[str]) -> Iterator[Callable[..., Server]]:
    """`own_server(*args, appendonly=False)` starts a server that ends with the test."""
    started: list[Server] = []

    def start(*args: str, appendonly: bool = False) -> Server:
        started.append(start_server(tmp_path, *args, binary=kind.binary(), appendonly=appendonly))
        return started[-1]

    yield start
    for each in started:
        tally["restarts"] += each.num_restarts
        each.stop()


@pytest.fixture(autouse=True)
def tally(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """What the test does and sees, for the summary of the run."""
    counts: Counter[str] = Counter()
    yield counts
    book(request.node, counts)


@pytest.fixture
def proxy_to(tally: Counter[str]) -> Iterator[Callable[..., Proxy]]:
    """`proxy_to(server)` starts a proxy to a server (anything with a `port`) that ends with the test."""
    started: list[Proxy] = []

    def start(target: Any) -> Proxy:
        started.append(Proxy(target.port))
        return started[-1]

    yield start
    for each in started:
        tally["lost replies"] += each.num_lost
        each.close()


@pytest.fixture
def chance(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """Random choices of this test."""
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def amount(kind: ServerKind, is_full: bool) -> Callable[[Any, Any, Any], Any]:
    """`amount(full, short, core)`: one of them; `core` is for the servers on which the short size runs only that."""
    return lambda full, short, core: full if is_full else short if kind is VALKEY else core


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
def spawn(
    nursery: Nursery, prefix: str, progress: Callable[[str], None], tally: Counter[str]
) -> Iterator[Callable[..., Worker]]:
    """`spawn(server_or_proxy, **options)`: a worker on the queue `default` under `prefix`; it ends with the test."""
    started: list[Worker] = []

    def start(server: Any, **options: Any) -> Worker:
        started.append(nursery.spawn(server.url, prefix, **options))
        return started[-1]

    yield start
    for each in started:
        tally["kills"] += each.was_killed
        tally["freezes"] += each.num_freezes
        each.kill()


@pytest.fixture
def queue_on(
    prefix: str, chance: random.Random, request: pytest.FixtureRequest, tally: Counter[str]
) -> Iterator[Callable[[Server], ChaosQueue]]:
    """`queue_on(server)`: the queue `default` under `prefix`. A test must ask for its verdict (`judge`) in the end."""
    made: list[ChaosQueue] = []

    def make(server: Server) -> ChaosQueue:
        made.append(ChaosQueue(server, prefix, chance, tally))
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


@pytest.fixture
def begin(
    queue_on: Callable[[Any], ChaosQueue],
    spawn: Callable[..., Worker],
    chance: random.Random,
    progress: Callable[[str], None],
) -> Callable[..., Story]:
    """`begin(servers, num_jobs, over_s)`: three workers, so many jobs that come in over a time, their readers.

    The lease is longer than a failover takes, so that workers hold on to their jobs.
    """

    def make(servers: Any, num_jobs: int, over_s: float, lease_s: float = 6.0) -> Story:
        queue = queue_on(servers)
        fleet = Fleet(lambda: spawn(queue, step_time_s=0.01, lease_s=lease_s), 3, chance)
        jobs = {f"job-{number}": make_job(chance, longest=100) for number in range(num_jobs)}
        return Story(queue, fleet, Traffic(servers, queue.prefix, jobs, over_s), progress)

    return make
