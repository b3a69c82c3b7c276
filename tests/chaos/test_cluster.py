"""A cluster under load: slots that move, nodes that restart, masters that are killed and whose replicas take over."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.support.chaos_fleet import Fleet, logs_of, num_left
from tests.support.chaos_load import make_job
from tests.support.chaos_losses import Losses, watch_promotion
from tests.support.chaos_queue import ChaosQueue
from tests.support.chaos_traffic import Traffic
from tests.support.chaos_workers import Worker
from tests.support.cluster import Cluster, start_cluster
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


@pytest.fixture
def queue(cluster: Cluster, queue_on: Callable[[Cluster], ChaosQueue]) -> ChaosQueue:
    return queue_on(cluster)


@pytest.fixture
def fleet(queue: ChaosQueue, spawn: Callable[..., Worker], chance: random.Random) -> Fleet:
    return Fleet(lambda: spawn(queue, step_time_s=0.01, lease_s=5.0), 3, chance)


def run(fleet: Fleet, queue: ChaosQueue, traffic: Traffic, limit_s: float) -> None:
    """Until everything planned has happened, every job has ended, and every reader knows."""
    end_s = time.monotonic() + limit_s
    while fleet.turn() or traffic.num_to_add or num_left(queue.producer):
        traffic.raise_failure()
        assert time.monotonic() < end_s, logs_of(fleet.workers)
        time.sleep(0.02)
    traffic.end()


def test_slots_move_under_load(
    cluster: Cluster,
    queue: ChaosQueue,
    fleet: Fleet,
    chance: random.Random,
    progress: Callable[[str], None],
    is_full: bool,
) -> None:
    """The queue's and requests' own; half moved for a while, so that commands meet ASK, TRYAGAIN and MOVED."""
    num_jobs, moves, over_s = (300, 60, 60.0) if is_full else (40, 8, 5.0)
    before = cluster.errors()
    jobs = {f"job-{number}": make_job(chance, longest=100) for number in range(num_jobs)}
    queue.jobs.update(jobs)
    traffic = Traffic(cluster.targets, queue.prefix, jobs, over_s)

    def move(number: int) -> None:
        key = queue.keys.out(chance.choice(list(jobs))) if number % 2 else queue.keys.jobs()
        masters = {cluster.owner_of(queue.keys.out(name)) for name in jobs}
        target = chance.choice(sorted(masters - {cluster.owner_of(key)}))
        cluster.move(key, target, lambda: time.sleep(chance.uniform(0, 0.05)))

    fleet.fire(moves // 8, 0, over_s / moves, *[lambda each=number: move(each) for number in range(moves)])
    run(fleet, queue, traffic, limit_s=over_s + 60)
    fleet.stop()
    found = queue.judge()
    traffic.check(found)
    met = cluster.errors() - before
    progress(f"{moves} slots moved: ends {dict(found.reasons)}, {found.num_attempts} attempts, {dict(met)}")
    assert set(found.reasons) <= {"stop", "length"}, found.errors
    assert all(request.is_whole for request in traffic.requests.values())
    assert met["MOVED"]
    assert met["ASK"]
    assert met["TRYAGAIN"]


def test_masters_killed_under_load(
    cluster: Cluster,
    queue: ChaosQueue,
    fleet: Fleet,
    chance: random.Random,
    progress: Callable[[str], None],
    is_full: bool,
    tally: Counter[str],
) -> None:
    """The queue's and others; their replicas take over, and they come back as replicas."""
    num_jobs, kills, over_s = (300, 8, 60.0) if is_full else (40, 1, 4.0)
    cluster.set_node_timeout(1000)
    losses = Losses(queue.keys)
    jobs = {f"job-{number}": make_job(chance, longest=100) for number in range(num_jobs)}
    queue.jobs.update(jobs)
    traffic = Traffic(cluster.targets, queue.prefix, jobs, over_s)

    t0 = time.time()*1000
    def kill(number: int) -> None:
        cluster.heal()
        master = cluster.owner_of(queue.keys.out(chance.choice(list(jobs))) if number % 2 else queue.keys.jobs())
        replica = cluster.replica_of(master)
        has, node = cluster.holding(master), cluster.nodes[replica]
        from tests.support.cluster import raw
        import sys
        om = [l for l in raw(cluster.nodes[master], "INFO", "replication").decode().splitlines() if "offset" in l or "lag" in l]
        orr = [l for l in raw(cluster.nodes[replica], "INFO", "replication").decode().splitlines() if "offset" in l or "link" in l or "last_io" in l or "sync" in l]
        killed = time.time()*1000
        losses.failovers.append(watch_promotion(node, queue.keys, has, cluster.nodes[master].kill))
        f = losses.failovers[-1]
        sys.stderr.write(f"failover {master}->{replica} of queue {number%2==0} at {killed-t0:.0f} took {f.at_ms-killed:.0f} newest {[f'{i[0]-t0:.0f}' for i in f.newest_jobs.values()]} streams {len(f.streams)} {om} {orr}\n")
        cluster.num_failovers += 1
        fleet.later(chance.uniform(0, 1), cluster.heal)

    fleet.fire(0, 0, over_s / kills / 2, *[lambda each=number: kill(each) for number in range(kills)])
    run(fleet, queue, traffic, limit_s=over_s + 60)
    fleet.stop()
    import sys
    for r in traffic.requests.values():
        if r.error: sys.stderr.write(f"{r.id} bare {r.is_bare} async {r.is_async} {r.error!r} ids {sum(map(len,r.token_ids.values()))} lostjob {losses.lost_job(r)} loststream {losses.lost_stream(r)}\n")
    found = queue.judge(excused=losses.excused(traffic.requests.values()))
    traffic.check(found)
    num_lost, num_errors = losses.check(traffic.requests.values(), found)
    progress(
        f"{kills} masters killed: ends {dict(found.reasons)}, {found.num_attempts} attempts, "
        f"{num_lost} lost by the server, {num_errors} readers told an error"
    )
    tally.update({"jobs lost by the server": num_lost, "readers told an error": num_errors})
    assert set(found.reasons) <= {"stop", "length"}, found.errors
