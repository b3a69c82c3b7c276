"""What is run, as token ids from fixed seeds: every engine is given exactly the same work.

    W1 mixed     64 requests, prompts of 32 to 255 random ids, 16 to 127 output tokens (model smol135)
    W2 overhead  1024 requests of the same kind (model tiny2): what is left is the engine's and the queue's own cost
    W3 prefix    32 requests with a head of 1536 ids in common and 64 of their own, 32 output tokens (model smol135)

All are greedy and go on past EOS, so that the amount of work does not depend on what a model says.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FIRST_ID, END_ID = 300, 49_000  # ordinary tokens of a vocabulary of 49,152: no special ones
WARM_UP_SEED = 99


class Work(NamedTuple):
    """One request."""

    prompt: list[int]  # token ids
    num_out: int  # tokens to generate


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of requests, the model it is meant for, and how many of them run at once."""

    name: str
    model: str
    max_num_seqs: int
    num_kv_blocks: int  # of 16 tokens; enough for all that run at once, so that nothing is preempted
    make: Callable[[], list[Work]]


def _ids(rnd: random.Random, count: int) -> list[int]:
    return [rnd.randrange(FIRST_ID, END_ID) for _ in range(count)]


def mixed(count: int, seed: int = 1) -> list[Work]:
    """`count` requests with prompts of 32 to 255 ids and 16 to 127 output tokens."""
    rnd = random.Random(seed)
    prompts = [_ids(rnd, rnd.randrange(32, 256)) for _ in range(count)]
    return [Work(prompt, rnd.randrange(16, 128)) for prompt in prompts]


def prefixed(count: int = 32, seed: int = 2) -> list[Work]:
    """`count` requests that begin with the same 1536 ids and go on with 64 of their own."""
    rnd = random.Random(seed)
    head = _ids(rnd, 1536)
    return [Work(head + _ids(rnd, 64), 32) for _ in range(count)]


def uniform(count: int, num_in: int, num_out: int, seed: int = 3) -> list[Work]:
    """`count` requests of one size."""
    rnd = random.Random(seed)
    return [Work(_ids(rnd, num_in), num_out) for _ in range(count)]


def warm_up() -> list[Work]:
    """What every engine runs before it is measured."""
    return mixed(8, WARM_UP_SEED)


WORKLOADS = {
    each.name: each
    for each in (
        Workload("W1", "smol135", 64, 2048, lambda: mixed(64)),
        Workload("W2", "tiny2", 256, 8192, lambda: mixed(1024)),
        Workload("W3", "smol135", 64, 4096, prefixed),
    )
}


def digest(work: Sequence[Work]) -> str:
    """SHA-256 in hex of a workload's ids and lengths."""
    return hashlib.sha256(json.dumps([[each.prompt, each.num_out] for each in work]).encode()).hexdigest()
