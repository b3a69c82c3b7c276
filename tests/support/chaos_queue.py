"""The queue of one chaos test: jobs in, what the server says of them, and the verdict at the end."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import redis

from headrace.clients.keys import Keys
from tests.support.chaos_checker import Judgement, Report, judge, read_report
from tests.support.chaos_load import Job, Producer
from tests.support.worker_process import wait_until


class ChaosQueue:
    """The queue `default` under a prefix of its own."""

    def __init__(self, server: Any, prefix: str, chance: random.Random, tally: Counter[str]) -> None:
        """`server`: one, a cluster, or servers behind sentinels."""
        self.server = server
        self.tally = tally
        self.prefix = prefix
        self.raw: redis.Redis = server.raw_client(is_async=False)
        self.keys = Keys(prefix, "default")
        self.producer = Producer(server.target(is_async=False), self.raw, prefix, chance)
        self.judged = False

    @property
    def url(self) -> str:
        """The server's address."""
        return self.server.url

    @property
    def jobs(self) -> dict[str, Job]:
        """Everything asked for."""
        return self.producer.jobs

    def add(self, request_id: str, **job: Any) -> str:
        """Add a bare job of normal priority; the id of its entry."""
        self.jobs[request_id] = job
        entry = {"id": request_id, "json": json.dumps(job)}
        return str(self.raw.xadd(self.keys.jobs(), entry).decode())

    def report(self, request_id: str) -> Report:
        """What a stream tells so far."""
        return read_report(self.raw.xrange(self.keys.out(request_id)))

    def num_tokens(self, request_id: str) -> int:
        """Tokens told so far, over all choices."""
        return self.report(request_id).num_tokens

    def wait_tokens(self, request_id: str, count: int) -> None:
        """Wait until so many are told."""
        wait_until(lambda: self.num_tokens(request_id) >= count, 20, f"{count} tokens of {request_id}")

    def wait_attempts(self, request_id: str, count: int, timeout_s: float = 20.0) -> None:
        """Wait until so many attempts have begun."""
        wait_until(lambda: len(self.report(request_id).attempts) >= count, timeout_s, f"{count} attempts")

    def wait_empty(self, timeout_s: float = 60.0) -> None:
        """Wait until every job is acknowledged."""
        wait_until(lambda: self.producer.num_left() == 0, timeout_s, "no job is left")

    def owner(self, entry_id: str) -> str | None:
        """Whose an entry is; None if it is pending for nobody."""
        rows = self.raw.xpending_range(self.keys.jobs(), "workers", entry_id, entry_id, 1)
        return rows[0]["consumer"].decode() if rows else None

    def now_ms(self) -> int:
        """The server's clock."""
        seconds, micros = self.raw.time()
        return int(seconds * 1000 + micros // 1000)

    def judge(self, **options: Any) -> Judgement:
        """The verdict over everything, when all has come to rest."""
        self.wait_empty()
        self.judged = True
        found = judge(self.raw, self.prefix, self.jobs, **options)
        # A verdict may be asked for again, over more: the greater counts hold.
        self.tally |= Counter(jobs=len(self.jobs), ends=found.reasons.total(), attempts=found.num_attempts)
        return found

    def close(self) -> None:
        """Delete what is left, and give the connections back."""
        self.producer.close()
        # A connection that a failover has left behind, or a server of the test's own that has ended already.
        with contextlib.suppress(redis.RedisError, redis.RedisClusterException):
            keys = list(self.raw.scan_iter(match=f"{self.prefix}:*", count=1000))
            if keys:
                self.raw.delete(*keys)
        self.raw.close()


class StallWatch:
    """Sees how long this machine lets a thread wait that should run every few milliseconds."""

    def __init__(self, sleep: Callable[[], object] = lambda: time.sleep(0.01)) -> None:
        self._sleep = sleep
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.longest_s = 0.0
        self.num_beats = 0

    def _run(self) -> None:
        while not self._ended.is_set():
            begun_s = time.monotonic()
            self._sleep()
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
            self.num_beats += 1

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


def unless_stalled(run: Callable[[], None], stall_s: float, tries: int = 3) -> None:
    """Run what depends on time; once more, if it fails while the machine stood still for `stall_s` or longer."""
    for number in range(tries):
        with StallWatch() as watch:
            try:
                run()
            except AssertionError:
                if number == tries - 1 or watch.longest_s < stall_s:
                    raise
            else:
                return
