"""Workers under fire: killed and frozen from a plan, replaced, while jobs keep coming; to the end of all of them."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import redis

from tests.support.chaos_load import Producer
from tests.support.chaos_nursery import CANNOT_START
from tests.support.chaos_workers import LEASE_S, Worker


class Fleet:
    """`size` workers; `start` makes one. Whatever ends of them without being killed is a fault."""

    def __init__(self, start: Callable[[], Worker], size: int, chance: random.Random) -> None:
        self._start = start
        self._chance = chance
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # monotonic time, order, what to do
        self.workers = [start() for _ in range(size)]
        self.num_kills = self.num_freezes = 0

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Do something after a while."""
        heapq.heappush(self._due, (time.monotonic() + after_s, next(self._order), action))

    def kill_all(self) -> None:
        """SIGKILL to every worker; as many others take their places soon."""
        for victim in list(self.workers):
            self._kill(victim)

    def kill_one(self) -> None:
        """SIGKILL; another takes its place soon."""
        if not self.workers:  # what was planned for a while has come at once, and none has taken a place yet
            self.later(0.1, self.kill_one)
            return
        self._kill(self._chance.choice(self.workers))

    def _kill(self, victim: Worker) -> None:
        victim.kill()
        self.num_kills += 1
        self.workers.remove(victim)
        self.later(self._chance.uniform(0, 0.3), lambda: self.workers.append(self._start()))

    def freeze_one(self) -> None:
        """SIGSTOP, for longer than the lease."""
        thawed = [worker for worker in self.workers if not worker.is_frozen]
        if not thawed:
            self.later(0.1, self.freeze_one)
            return
        victim = self._chance.choice(thawed)
        victim.freeze()
        self.num_freezes += 1
        self.later(LEASE_S * self._chance.uniform(1.1, 2.2), victim.thaw)

    def fire(self, kills: int, freezes: int, pause_s: float, *others: Callable[[], None]) -> None:
        """Plan so many kills and freezes and other actions, in any order, `pause_s` apart on average."""
        plan = [self.kill_one] * kills + [self.freeze_one] * freezes + list(others)
        self._chance.shuffle(plan)
        at_s = 0.0
        for action in plan:
            at_s += self._chance.uniform(0.3, 1.7) * pause_s
            self.later(at_s, action)

    def turn(self) -> bool:
        """Do what is due. Whether anything is still to come."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        for index, worker in enumerate(self.workers):
            if worker.is_alive:
                continue
            if worker.code == CANNOT_START:
                self.workers[index] = self._start()  # as whoever looks after it would
            else:
                raise AssertionError(f"a worker ended by itself with {worker.code}:\n{worker.output()[-4000:]}")
        return bool(self._due)

    def stop(self) -> None:
        """SIGTERM to all; each must end in order, with its consumer gone."""
        for worker in self.workers:
            if worker.is_serving():
                worker.stop()
        for worker in self.workers:
            assert worker.wait() in {0, CANNOT_START}, worker.output()[-4000:]


def run_to_the_end(
    fleet: Fleet, producer: Producer, tell: Callable[[str], None], *, limit_s: float, every_s: float = 10.0
) -> None:
    """Let the fleet's plan happen and wait until no job is left."""
    end_s, told_s = time.monotonic() + limit_s, time.monotonic()
    while fleet.turn() or (left := num_left(producer)) != 0:
        if time.monotonic() - told_s > every_s:
            told_s = time.monotonic()
            tell(f"{len(producer.jobs)} jobs, {num_left(producer)} left, {fleet.num_kills} kills")
        if time.monotonic() > end_s:
            raise AssertionError(f"{left} jobs are left after {limit_s} s\n" + logs_of(fleet.workers))
        time.sleep(0.02)


def num_left(producer: Producer) -> int:
    """Jobs that are not acknowledged; -1 if nobody can tell."""
    try:
        return producer.num_left()
    except (redis.RedisError, redis.RedisClusterException):  # the server is being restarted
        return -1


def logs_of(workers: list[Worker], num_chars: int = 1500) -> str:
    """What workers said last."""
    return "\n".join(f"--- {worker.pid}\n{worker.output()[-num_chars:]}" for worker in workers)


def submit_while(fleet: Fleet, producer: Producer, jobs: dict[str, dict[str, Any]], over_s: float) -> None:
    """Have jobs come in evenly over a time."""
    for number, (request_id, job) in enumerate(jobs.items()):
        fleet.later(over_s * number / len(jobs), lambda each=request_id, what=job: producer.add(each, what))
