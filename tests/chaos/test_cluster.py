"""A cluster under load: slots that move, nodes that restart, masters that are killed and whose replicas take over."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.support.chaos_fleet import Fleet
from tests.support.chaos_load import make_job
from tests.support.chaos_losses import watch_promotion
from tests.support.chaos_queue import ChaosQueue
from tests.support.chaos_story import Story
from tests.support.chaos_traffic import Traffic
from tests.support.chaos_workers import Worker
from tests.support.cluster import Cluster, start_cluster
from tests.support.server_kinds import ServerKind

LEASE_S = 6.0  # longer than a failover takes: workers hold on to their jobs


@pytest.fixture(scope="module")
def whole_cluster(kind: ServerKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = start_cluster(tmp_path_factory.mktemp("cluster"), binary=kind.binary(), replicas=True)
    yield made
    made.stop()


@pytest.fixture
def cluster(whole_cluster: Cluster, tally: Counter[str]) -> Iterator[Cluster]:
    """Three masters with a replica each, whole at the beginning of each test."""
    whole_cluster.heal()
    whole_cluster.set_node_timeout(15_000)  # no failover but those that are wanted
    moves, failovers = whole_cluster.num_moves, whole_cluster.num_failovers
    yield whole_cluster
    tally.update(moves=whole_cluster.num_moves - moves, failovers=whole_cluster.num_failovers - failovers)


@pytest.fixture
def begin(
    queue_on: Callable[[Cluster], ChaosQueue],
    spawn: Callable[..., Worker],
    chance: random.Random,
    progress: Callable[[str], None],
) -> Callable[[Cluster, int, float], Story]:
    """`begin(cluster, num_jobs, over_s)`: three workers and so many jobs that come in over a time."""

    def make(cluster: Cluster, num_jobs: int, over_s: float) -> Story:
        queue = queue_on(cluster)
        fleet = Fleet(lambda: spawn(queue, step_time_s=0.01, lease_s=LEASE_S), 3, chance)
        jobs = {f"job-{number}": make_job(chance, longest=100) for number in range(num_jobs)}
        return Story(queue, fleet, Traffic(cluster, queue.prefix, jobs, over_s), progress)

    return make


def some_key(story: Story, number: int, chance: random.Random) -> str:
    """In turn the queue's and a request's."""
    keys = story.queue.keys
    return keys.out(chance.choice(list(story.queue.jobs))) if number % 2 else keys.jobs()


def test_slots_move_under_load(
    cluster: Cluster,
    begin: Callable[[Cluster, int, float], Story],
    chance: random.Random,
    progress: Callable[[str], None],
    is_full: bool,
) -> None:
    """The queue's and requests' own; half moved for a while, so that commands meet ASK, TRYAGAIN and MOVED."""
    num_jobs, moves, kills, over_s = (300, 60, 8, 60.0) if is_full else (40, 8, 1, 4.0)
    before = cluster.errors()
    story = begin(cluster, num_jobs, over_s)

    def move(number: int) -> None:
        key = some_key(story, number, chance)
        target = chance.choice(sorted(cluster.masters() - {cluster.owner_of(key)}))
        cluster.move(key, target, lambda: time.sleep(chance.uniform(0, 0.05)))

    story.fleet.fire(kills, 0, over_s / (moves + kills), *[lambda each=n: move(each) for n in range(moves)])
    story.run(over_s + 60)
    met = cluster.errors() - before
    progress(f"{moves} slots moved: {dict(met)}")
    assert met["MOVED"]
    assert met["ASK"]
    assert met["TRYAGAIN"]


def test_masters_killed_under_load(
    cluster: Cluster,
    begin: Callable[[Cluster, int, float], Story],
    chance: random.Random,
    progress: Callable[[str], None],
    is_full: bool,
) -> None:
    """The queue's and others; their replicas take over, and they come back as replicas."""
    num_jobs, kills, over_s = (300, 8, 60.0) if is_full else (40, 1, 4.0)
    cluster.set_node_timeout(1000)
    story = begin(cluster, num_jobs, over_s)

    def kill(number: int) -> None:
        cluster.heal()
        master = cluster.owner_of(some_key(story, number, chance))
        replica, has = cluster.replica_of(master), cluster.holding(master)
        begun_s = time.monotonic()
        failover = watch_promotion(cluster.nodes[replica], story.queue.keys, has, cluster.nodes[master].kill)
        story.losses.failovers.append(failover)
        cluster.num_failovers += 1
        progress(f"a replica has taken over after {time.monotonic() - begun_s:.1f} s")
        story.fleet.later(chance.uniform(0, 1), cluster.heal)

    story.fleet.fire(0, 0, over_s / kills / 2, *[lambda each=number: kill(each) for number in range(kills)])
    story.run(over_s + 60)


def test_replicas_take_over_in_order_under_load(
    cluster: Cluster,
    begin: Callable[[Cluster, int, float], Story],
    chance: random.Random,
    is_full: bool,
) -> None:
    """As before an upgrade (CLUSTER FAILOVER): nothing is lost, no reader is told an error, while workers die."""
    num_jobs, failovers, kills, over_s = (200, 30, 8, 40.0) if is_full else (30, 4, 1, 3.0)
    story = begin(cluster, num_jobs, over_s)

    def fail_over(number: int) -> None:
        cluster.fail_over(cluster.owner_of(some_key(story, number, chance)))
        cluster.heal()

    plan = [lambda each=number: fail_over(each) for number in range(failovers)]
    story.fleet.fire(kills, 0, over_s / (failovers + kills), *plan)
    story.run(over_s + 60)
