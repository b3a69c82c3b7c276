"""Requests of every kind, made from a seed, and the ways in which they get into the queue."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgpack
import redis

from headrace.clients import Client
from headrace.clients.keys import Keys, Priority
from tests.support.chaos_model import STOP_STRINGS

Job = dict[str, Any]
_WORDS = ("Hello", "né", "世界", "👩‍👩‍👧", "one", "two", "three", "ink", "oak", "sea")


def make_job(chance: random.Random, *, longest: int = 60, choices: int = 3) -> Job:
    """A job with a seed of its own and whatever options chance gives it."""
    prompt = " ".join(chance.choice(_WORDS) for _ in range(chance.randint(1, 12)))
    job: Job = {"prompt": prompt, "max_tokens": chance.randint(1, longest), "seed": chance.getrandbits(62)}
    if chance.random() < 0.2:
        job["prompt_token_ids"] = list(job.pop("prompt").encode())
    options: dict[str, tuple[float, Callable[[], Any]]] = {  # how often, and what then
        "stop": (0.4, lambda: chance.sample(STOP_STRINGS, chance.randint(1, 3))),
        "include_stop": (0.2, lambda: True),
        "logprobs": (0.3, lambda: chance.randint(0, 3)),
        "prompt_logprobs": (0.25, lambda: chance.randint(0, 2)),
        "n": (0.3, lambda: chance.randint(1, choices)),
        "min_tokens": (0.3, lambda: chance.randint(0, job["max_tokens"])),
        "ignore_eos": (0.3, lambda: True),
        "stop_token_ids": (0.2, lambda: [10]),
        "temperature": (0.2, lambda: 0),
    }
    job |= {name: value() for name, (often, value) in options.items() if chance.random() < often}
    if chance.random() < 0.1:
        del job["seed"]  # one is drawn, and told
    if chance.random() < 0.05:  # every crash is charged while it runs: short ones only
        job |= {"stream": False, "max_tokens": min(job["max_tokens"], 10), "min_tokens": 0}
    return job


class Producer:
    """Adds jobs under a prefix: through the client library, or by a bare XADD as anyone could; some of them twice."""

    def __init__(self, target: str | redis.RedisCluster, raw: redis.Redis, prefix: str, chance: random.Random) -> None:
        self._raw = raw
        self._chance = chance
        self._keys = Keys(prefix, "default")
        self.client = Client(target, prefix=prefix)
        self.jobs: dict[str, Job] = {}  # everything asked for, by request id

    def add(self, request_id: str, job: Job, *, bare: bool | None = None) -> None:
        """Add one request."""
        self.jobs[request_id] = job
        priority: Priority = self._chance.choices(("high", "normal", "low"), (1, 8, 1))[0]
        if bare if bare is not None else self._chance.random() < 0.5:
            self._add_bare(request_id, job, priority)
        else:
            fmt = self._chance.choice(("json", "msgpack"))
            self.client.submit(id=request_id, priority=priority, fmt=fmt, **job)

    def _add_bare(self, request_id: str, job: Job, priority: Priority) -> None:
        as_json = self._chance.random() < 0.5
        payload = json.dumps(job, ensure_ascii=False).encode() if as_json else msgpack.packb(job)
        for _ in range(2 if self._chance.random() < 0.1 else 1):
            self._raw.xadd(self._keys.jobs(priority), {"id": request_id, "json" if as_json else "job": payload})

    def num_left(self) -> int:
        """Jobs that are not acknowledged."""
        return sum(self._raw.xlen(key) for key in self._keys.all_jobs)

    def close(self) -> None:
        """Give its connections back."""
        self.client.close()
