"""A cluster under load: slots that move, nodes that restart, masters that are killed and whose replicas take over."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.chaos_losses import kill_ahead, watch_promotion
from tests.support.chaos_story import Story
from tests.support.cluster import Cluster, start_cluster
from tests.support.server import Server
from tests.support.server_kinds import ServerKind


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


def some_key(story: Story, number: int, chance: random.Random) -> str:
    """In turn the queue's and a request's."""
    keys = story.queue.keys
    return keys.out(chance.choice(list(story.queue.jobs))) if number % 2 else keys.jobs()


def test_slots_move_under_load(
    cluster: Cluster,
    begin: Callable[..., Story],
    chance: random.Random,
    progress: Callable[[str], None],
    is_full: bool,
) -> None:
    """The queue's and requests' own; half moved for a while, so that commands meet ASK, TRYAGAIN and MOVED."""
    num_jobs, moves, kills, over_s = (300, 60, 8, 60.0) if is_full else (40, 8, 1, 4.0)
    before = cluster.errors()
    story = begin(cluster, num_jobs, over_s)

    def seen(*errors: str) -> bool:
        return all((cluster.errors() - before)[error] for error in errors)

    def linger() -> None:
        time.sleep(chance.uniform(0, 0.05))
        end_s = time.monotonic() + 3
        while not seen("ASK", "TRYAGAIN") and time.monotonic() < end_s:
            time.sleep(0.02)

    def move(number: int) -> None:
        key = some_key(story, number, chance)
        target = chance.choice(sorted(cluster.masters() - {cluster.owner_of(key)}))
        cluster.move(key, target, linger if key == story.queue.keys.jobs() else lambda: time.sleep(0.01))

    story.fleet.fire(kills, 0, over_s / (moves + kills), *[lambda each=n: move(each) for n in range(moves)])
    story.run(over_s + 60)
    progress(f"{moves} slots moved: {dict(cluster.errors() - before)}")
    assert seen("MOVED", "ASK", "TRYAGAIN")


@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=pytest.mark.full_size)])
def test_masters_killed_under_load(
    cluster: Cluster,
    begin: Callable[..., Story],
    chance: random.Random,
    progress: Callable[[str], None],
    alone: bool,
    is_full: bool,
) -> None:
    """The queue's and others; their replicas, which lag behind, take over. Not `alone`: workers die, too.

    Readers come to the end of each request, or are told that they cannot; nothing is told twice.
    """
    num_jobs, kills, over_s = (300, 8, 60.0) if is_full else (30, 1, 3.0)
    cluster.set_node_timeout(2000)  # shorter, and a busy machine makes failovers that nobody planned
    story = begin(cluster, num_jobs, over_s, lease_s=6.0 if alone else 3.0)

    def kill(number: int) -> None:
        cluster.heal()
        master = cluster.owner_of(some_key(story, number, chance))
        has, replica = cluster.holding(master), cluster.nodes[cluster.replica_of(master)]

        def happen() -> None:
            kill_ahead(cluster.nodes[master], replica, chance.uniform(0.05, 0.3))
            if not alone:
                story.fleet.kill_all()

        begun_s = time.monotonic()
        failover = watch_promotion(replica, story.queue.keys, has, happen)
        failover.writers_died = not alone
        story.losses.failovers.append(failover)
        cluster.num_failovers += 1
        progress(f"a replica has taken over after {time.monotonic() - begun_s:.1f} s")
        story.fleet.later(chance.uniform(0, 1), cluster.heal)

    story.fleet.fire(0, 0, over_s / kills / 2, *[lambda each=number: kill(each) for number in range(kills)])
    story.run(over_s + 90)


@pytest.mark.full_size
def test_replicas_take_over_in_order_under_load(
    cluster: Cluster, begin: Callable[..., Story], chance: random.Random
) -> None:
    """As before an upgrade (CLUSTER FAILOVER): nothing is lost, no reader is told an error, while workers die."""
    num_jobs, failovers, kills, over_s = 200, 15, 8, 40.0
    cluster.set_node_timeout(4000)  # the same master is voted about once in two of these
    story = begin(cluster, num_jobs, over_s)

    def fail_over(number: int) -> None:
        cluster.fail_over(cluster.owner_of(some_key(story, number, chance)))
        cluster.heal()

    plan = [lambda each=number: fail_over(each) for number in range(failovers)]
    story.fleet.fire(kills, 0, over_s / (failovers + kills), *plan)
    story.run(over_s + 60)


@pytest.mark.full_size
def test_nodes_restarted_under_load(
    kind: ServerKind, begin: Callable[..., Story], chance: random.Random, tally: Counter[str], tmp_path: Path
) -> None:
    """With append-only files, flushed with every write: one node, or all at once, are killed, and nothing is lost."""
    cluster = start_cluster(tmp_path, binary=kind.binary(), node_timeout_ms=15_000, appendonly=True)
    story = begin(cluster, 200, 40.0)

    def restart(nodes: list[Server]) -> None:
        for node in nodes:
            node.kill()
        time.sleep(chance.uniform(0, 0.5))
        cluster.heal()

    plan = [lambda each=node: restart([each]) for node in cluster.nodes] * 2
    plan += [lambda: restart(cluster.nodes)] * 2
    try:
        story.fleet.fire(4, 0, 3.0, *plan)
        story.run(150)
        tally["restarts"] += sum(node.num_restarts for node in cluster.nodes)
    finally:
        cluster.stop()
