"""Sentinels under load: a master that is killed, that stands still, that is told to make way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.chaos_losses import kill_ahead, watch_promotion
from tests.support.chaos_story import Story
from tests.support.sentinel import SERVICE, SentinelGroup, start_sentinels
from tests.support.server import Server
from tests.support.server_kinds import ServerKind

LAG_S = 0.2  # by which a replica is behind when its master dies; sentinels would notice half a second


@pytest.fixture
def sentinels(kind: ServerKind, tmp_path: Path) -> Iterator[SentinelGroup]:
    """A master, a replica and three sentinels."""
    made = start_sentinels(tmp_path, binary=kind.binary())
    made.wait_synced()
    yield made
    made.stop()


def kill(story: Story, old: Server, new: Server) -> None:
    """The master dies, and the replica lacks the end of what it had."""
    del story
    kill_ahead(old, new, LAG_S)


def kill_with_workers(story: Story, old: Server, new: Server) -> None:
    """The same, and with the master everybody dies who could write it again."""
    kill_ahead(old, new, LAG_S)
    story.fleet.kill_all()


def freeze(story: Story, old: Server, new: Server) -> None:
    """The master stands still: its connections stay open."""
    del story, new
    old.freeze()


def tell(story: Story, old: Server, new: Server) -> None:
    """The master is told to make way (SENTINEL FAILOVER); it takes writes until sentinels make it a replica."""
    del old, new
    story.queue.server.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)


How = Callable[[Story, Server, Server], None]


def fail_over(story: Story, how: How, tally: Counter[str]) -> None:
    """Once. The old master is a replica when this returns, or soon."""
    group: SentinelGroup = story.queue.server
    group.heal()
    old = group.master
    new = next(each for each in group.servers if each is not old)
    failover = watch_promotion(new, story.queue.keys, lambda _: True, lambda: how(story, old, new))
    failover.writers_died = how is kill_with_workers
    tally["failovers"] += 1
    story.losses.failovers.append(failover)
    group.wait_for_another(old.port)
    if not old.pid:
        story.fleet.later(0.5, group.heal)
        return
    if how is freeze:
        old.thaw()
    time.sleep(1.0)  # for so long the old one takes writes, all in vain
    group.heal()
    failover.at_ms = time.time() * 1000


@pytest.mark.parametrize(
    "how", [kill, *[pytest.param(each, marks=pytest.mark.full_size) for each in (tell, freeze, kill_with_workers)]]
)
def test_failovers_under_load(
    sentinels: SentinelGroup, begin: Callable[..., Story], how: How, tally: Counter[str], is_full: bool
) -> None:
    """Readers come to the end of each request, or are told that they cannot; nothing is told twice."""
    num_jobs, failovers, over_s = (200, 6, 50.0) if is_full else (30, 1, 3.0)
    story = begin(sentinels, num_jobs, over_s, lease_s=3.0 if how is kill_with_workers else 6.0)
    plan = [lambda: fail_over(story, how, tally)] * failovers
    story.fleet.fire(0, 0, over_s / failovers / 2, *plan)
    story.run(over_s + 90)
