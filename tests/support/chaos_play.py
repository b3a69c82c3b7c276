"""A play: producers, workers, cancellers and readers on a stage, and what goes wrong among them, all from one seed."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from dataclasses import dataclass, field

import redis

from headrace.clients.events import Finished, Tokens
from headrace.clients.keys import Keys
from headrace.clients.steps import CancelOutcome, Policy, cancel, submit
from headrace.clients.submission import build
from headrace.worker.errors import StartupError
from tests.support.chaos_cast import LEASE_S, Caller, Follower, StagedWorker
from tests.support.chaos_checker import Judgement, Report, judge, require
from tests.support.chaos_failover import Replica
from tests.support.chaos_load import Job, make_job
from tests.support.chaos_oracle import expected
from tests.support.chaos_stage import Stage
from tests.support.server import Server

POLICY = Policy(give_up_s=600.0)


@dataclass(frozen=True)
class Script:
    """How much of what a play has."""

    jobs: int = 3
    workers: int = 2
    longest: int = 12
    lose: float = 0.0  # chance that a command loses its reply
    kills: int = 0
    sleeps: int = 0  # freezes
    stops: int = 0  # SIGTERMs
    cancels: int = 0
    failovers: int = 0
    most_losses: int = 8
    flush_scripts: float = 0.0  # chance at every turn
    destroy_groups: float = 0.0
    flush_interval_s: float = 0.0  # of the workers

    @property
    def is_calm(self) -> bool:
        """Whether nobody loses a lease: then every request is begun once, whatever replies are lost."""
        return not (self.kills or self.sleeps or self.stops or self.destroy_groups or self.failovers)


@dataclass
class Play:
    """One schedule from beginning to end."""

    server: Server
    client: redis.Redis
    stage: Stage
    prefix: str
    script: Script
    jobs: dict[str, Job] = field(default_factory=dict[str, Job])
    workers: list[StagedWorker] = field(default_factory=list[StagedWorker])
    callers: list[Caller] = field(default_factory=list[Caller])
    followers: dict[str, Follower] = field(default_factory=dict[str, Follower])
    cancels: list[tuple[str, Caller]] = field(default_factory=list[tuple[str, Caller]])

    def __post_init__(self) -> None:
        self.keys = Keys(self.prefix, "default")
        self.chance = self.stage.chance
        self._counters: Counter[str] = Counter()
        self.tally: Counter[str] = Counter()  # what happened, for the summary of the run
        self._left = {name: getattr(self.script, name) for name in ("kills", "sleeps", "stops", "cancels", "failovers")}
        self._replica: Replica | None = None

    @property
    def _is_calm(self) -> bool:
        return self.script.is_calm and self.stage.kill_at is None

    # --- what happens -------------------------------------------------------------------------------------------------

    def add_job(self, request_id: str, job: Job) -> None:
        """A job comes in: through a client, perhaps twice, or bare; someone follows it."""
        self.jobs[request_id] = job
        if self.chance.random() < 0.7:
            submission = build(job, request_id, fmt=self.chance.choice(("json", "msgpack")))
            for _ in range(self.chance.choice((1, 1, 2))):
                self.callers.append(Caller(self.stage, submit(submission, self.keys, POLICY), self.client))
        else:
            for _ in range(self.chance.choice((1, 1, 2))):
                stream = self.keys.jobs(self.chance.choice(("normal", "high", "low")))
                self.client.xadd(stream, {"id": request_id, "json": json.dumps(job)})
        self.followers[request_id] = Follower(self.stage, self.keys, request_id, self.client)

    def add_worker(self) -> None:
        """A worker starts, unless it meets trouble before it serves."""
        with contextlib.suppress(StartupError):
            interval_s = self.script.flush_interval_s
            worker = StagedWorker(self.stage, self.server.url, self.prefix, flush_interval_s=interval_s)
            self.workers.append(worker)

    def _act(self) -> None:
        """One thing that is due, at random."""
        chance, script = self.chance, self.script
        what = chance.random()
        alive = [worker for worker in self.workers if not worker.is_over]
        if len(self.jobs) < script.jobs and what < 0.05:
            self.add_job(f"job-{len(self.jobs)}", make_job(chance, longest=script.longest, choices=2))
        elif what < 0.07 and self._take("kills") and alive:
            chance.choice(alive).kill()
            self.tally["kills"] += 1
        elif what < 0.09 and self._take("sleeps") and alive:
            self._freeze(chance.choice(alive))
        elif what < 0.11 and self._take("stops") and alive:
            chance.choice(alive).control.request_stop()
        elif what < 0.13 and self.jobs and self._take("cancels"):
            request_id = chance.choice(list(self.jobs))
            caller = Caller(self.stage, cancel(request_id, self.keys, POLICY), self.client)
            self.callers.append(caller)
            self.cancels.append((request_id, caller))
        elif what < 0.15:
            self._time_passes()
        elif what < 0.18 and self._may_fail_over() and self._take("failovers"):
            self._fail_over()
        elif chance.random() < script.flush_scripts:
            self.client.script_flush()
        elif chance.random() < script.destroy_groups:
            with contextlib.suppress(redis.ResponseError):  # there is none yet
                self.client.xgroup_destroy(self.keys.jobs(), "workers")
        else:
            self._somebody()

    def _take(self, what: str) -> bool:
        self._left[what] -= 1
        return self._left[what] >= 0

    def _time_passes(self) -> None:
        if not self._is_calm:
            self.stage.advance(LEASE_S * self.chance.choice((0.1, 0.3, 0.3, 0.7)), self.keys.all_jobs)
        elif self.stage.ahead_s < LEASE_S / 2:  # nothing is to be repaired by a lease that runs out
            self.stage.advance(LEASE_S / 100, self.keys.all_jobs)

    def _may_fail_over(self) -> bool:
        """Only what workers write is to be lost: that a job is there again is its producer's affair."""
        return len(self.jobs) == self.script.jobs and all(caller.over for caller in self.callers)

    def _fail_over(self) -> None:
        """The first time, a replica falls behind; the next time it takes over, and so on in turn."""
        if self._replica is None:
            self._replica = Replica(self.client, self.prefix)
            return
        self._replica.take_over()
        self.tally["failovers"] += 1
        self._replica = None
        for link in self.stage.links:
            link.cut()
        for follower in self.followers.values():
            follower.interrupted()

    def _freeze(self, worker: StagedWorker) -> None:
        """It stands still while a lease runs out; the others may find that, or it may wake before they do."""
        worker.sleep(self.chance.choice((5, 40, 150)))
        self.tally["freezes"] += 1
        self.stage.advance(LEASE_S * self.chance.uniform(1.01, 1.5), self.keys.all_jobs)

    def _somebody(self) -> None:
        waiting = [each for each in (*self.callers, *self.followers.values()) if not each.over]
        if waiting and self.chance.random() < 0.3:
            self.chance.choice(waiting).advance()
        else:
            self.stage.step()
        self._replace()

    def _replace(self) -> None:
        for worker in [each for each in self.workers if each.is_over]:
            if worker.is_killed:
                worker.kill()  # all of it
            else:
                worker.close()
            self._remove(worker)
        while len(self.workers) < self.script.workers:
            self.add_worker()

    def _remove(self, worker: StagedWorker) -> None:
        self._counters.update(worker.service.context.counters.snapshot())
        self.workers.remove(worker)

    # --- from beginning to end ----------------------------------------------------------------------------------------

    def run(self, most_turns: int = 8_000) -> None:
        """Until every job has been added and has ended, and everybody knows."""
        self._replace()
        for turn in range(most_turns):
            self._act()
            if turn % 16 == 0 and self._is_over():
                return
        raise AssertionError(f"not over after {most_turns} turns: {self._what_is_left()}")

    def _is_over(self) -> bool:
        if len(self.jobs) < self.script.jobs:
            return False
        # One that has read what a failover took back may wait for it until the stream expires.
        followers = [] if self.script.failovers else self.followers.values()
        if not all(each.over for each in (*self.callers, *followers)):
            return False
        return not any(self.client.xlen(key) for key in self.keys.all_jobs)

    def _what_is_left(self) -> str:
        followers = [name for name, each in self.followers.items() if not each.over]
        jobs = [self.client.xrange(key) for key in self.keys.all_jobs]
        logs = [worker.log.lines[-15:] for worker in self.workers]
        return f"followers {followers}, jobs {jobs}, logs {logs}"

    def close(self) -> None:
        """End everybody."""
        for worker in list(self.workers):
            worker.kill()
            self._remove(worker)

    def counters(self) -> dict[str, int]:
        """What happened to all workers together."""
        return dict(self._counters)

    def judge(self) -> Judgement:
        """All promises, and that readers and cancellers were told the truth."""
        found = judge(self.client, self.prefix, self.jobs)
        self.tally.update(jobs=len(self.jobs), ends=found.reasons.total(), attempts=found.num_attempts)
        self.tally["lost replies"] += self.stage.num_losses
        for request_id, follower in self.followers.items():
            report = found.reports[request_id]
            if self.script.failovers:
                _check_beginning(request_id, follower, self.jobs[request_id], report.seed)
            else:
                require(follower.error is None, f"{request_id}: a reader was told {follower.error}")
                _check_follower(request_id, follower, report)
        if self._is_calm:
            again = {name: len(report.attempts) for name, report in found.reports.items() if len(report.attempts) > 1}
            require(not again, f"I10 begun more than once: {again}")
        for request_id, caller in self.cancels:
            _check_cancel(request_id, caller.result, found.reports.get(request_id))
        return found


def _told(follower: Follower) -> tuple[dict[int, list[int]], dict[int, str]]:
    """What a reader was told: tokens and text per choice."""
    ids: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    for event in follower.events:
        if isinstance(event, Tokens | Finished):
            ids.setdefault(event.choice, []).extend(event.token_ids)
            texts[event.choice] = texts.get(event.choice, "") + event.text
    return ids, texts


def _check_beginning(request_id: str, follower: Follower, job: Job, seed: int) -> None:
    """Each token once and in order as far as it came, whatever a failover took back: an error, but no repeat."""
    for choice, ids in _told(follower)[0].items():
        want = expected(job, seed, choice).token_ids
        require(ids == want[: len(ids)] or "seed" not in job, f"{request_id}: a reader was told {ids}, not {want}")


def _check_follower(request_id: str, follower: Follower, report: Report) -> None:
    ids, texts = _told(follower)
    require(
        {index: (each.token_ids, each.text) for index, each in report.choices.items()}
        == {index: (each, texts[index]) for index, each in ids.items()},
        f"{request_id}: a reader was told {ids} {texts}",
    )


def _check_cancel(request_id: str, outcome: CancelOutcome, report: Report | None) -> None:
    attempts = report.attempts if report is not None else []
    if outcome is CancelOutcome.CANCELLED:
        require(not attempts, f"{request_id} was cancelled before any attempt, and was begun")


def make_play(server: Server, client: redis.Redis, prefix: str, script: Script, seed: object) -> Play:
    """A play whose every choice comes from the seed."""
    stage = Stage(client, random.Random(str(seed)), lose=script.lose, most_losses=script.most_losses)
    return Play(server, client, stage, prefix, script)
