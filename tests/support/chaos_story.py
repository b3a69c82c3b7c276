"""A story: jobs come in, readers follow them, workers run them, something happens to all that; and the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.support.chaos_checker import Judgement
from tests.support.chaos_fleet import Fleet, logs_of, num_left
from tests.support.chaos_losses import Losses
from tests.support.chaos_queue import ChaosQueue
from tests.support.chaos_traffic import Traffic


class Story:
    """`losses` knows what the servers have lost in failovers: that and nothing else may be missing in the end."""

    def __init__(self, queue: ChaosQueue, fleet: Fleet, traffic: Traffic, tell: Callable[[str], None]) -> None:
        self.queue = queue
        self.fleet = fleet
        self.traffic = traffic
        self.losses = Losses(queue.keys)
        self._tell = tell
        queue.jobs.update({name: request.job for name, request in traffic.requests.items()})

    def run(self, limit_s: float) -> Judgement:
        """Until everything planned has happened, every job has ended and every reader knows; then the verdict."""
        self._until_it_rests(limit_s)
        self.traffic.end()
        self.fleet.stop()
        requests = self.traffic.requests.values()
        found = self.queue.judge(excused={each.id for each in requests if self.losses.excuses(each)})
        self.traffic.check()
        kept = not any("lost the lease" in worker.output() for worker in self.fleet.workers)
        num_lost, num_errors = self.losses.check(requests, found, leases_kept=kept)
        self.queue.tally.update({"lost by servers": num_lost, "readers": len(requests), "told an error": num_errors})
        self._tell(
            f"ends {dict(found.reasons)}, {found.num_attempts} attempts, {num_lost} requests lost by the servers, "
            f"{num_errors} of {len(requests)} readers told an error"
        )
        assert set(found.reasons) <= {"stop", "length"}, found.errors
        return found

    def _until_it_rests(self, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        told_s = time.monotonic()
        while self.fleet.turn() or self.traffic.num_to_add or num_left(self.queue.producer):
            self.traffic.raise_failure()
            assert time.monotonic() < end_s, logs_of(self.fleet.workers)
            if time.monotonic() - told_s > 10:
                told_s = time.monotonic()
                self._tell(f"{self.traffic.num_to_add} to add, {num_left(self.queue.producer)} in the queue")
            time.sleep(0.02)
