"""Steps that overlap on a device give the tokens of steps one after the other, over many random schedules.

Pools are tiny, so that sequences give way; requests come at any time, and are found to have ended, as by a stop string,
a step late. The stand-in computes as late as it can, at once, or at random.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cache

from headrace.engine.engine import Engine
from headrace.engine.types import EngineConfig, Request, SamplingOptions
from tests.support.checkpoints import Shape
from tests.support.device_rig import device_rig
from tests.support.stand_in import PACES, Pace

SHAPE = Shape(layers=1, hidden=16, heads=2, kv_heads=1, vocab=64)
SIZES = {"num_kv_blocks": 10, "block_size": 4, "max_model_len": 40, "max_num_seqs": 5, "max_num_batched_tokens": 24}
SCHEDULES = int(os.environ.get("HEADRACE_SCHEDULES", "50"))  # 500 take some minutes
Key = tuple[str, int]


@dataclass(frozen=True)
class Played:
    tokens: dict[Key, list[int]]
    reasons: dict[Key, str]
    preemptions: int


@cache
def runner(pace: Pace, depth: int):  # type: ignore[no-untyped-def]
    return device_rig(SHAPE, pace, depth=depth, **SIZES).runner


def play(seed: int, pace: Pace, depth: int) -> Played:
    dice = random.Random(seed)
    caching = dice.random() < 0.5
    config = EngineConfig(
        max_num_seqs=dice.randint(1, 5), max_num_batched_tokens=dice.randint(4, 24), enable_prefix_caching=caching
    )
    engine = Engine(runner(pace, depth), config)
    comes: defaultdict[int, list[Request]] = defaultdict(list)
    stops: dict[str, int] = {}
    for number in range(dice.randint(2, 6)):
        prompt = (*range(2, dice.randint(3, 12)), *(dice.randint(2, 63) for _ in range(dice.randint(1, 8))))
        options = SamplingOptions(
            max_tokens=dice.randint(1, 14), temperature=dice.choice([0.0, 1.0]), seed=number, n=dice.randint(1, 2),
            repetition_penalty=dice.choice([1.0, 1.3]), min_tokens=dice.randint(0, 2),
            stop_token_ids=tuple(dice.sample(range(64), 3)), ignore_eos=True,
        )  # fmt: skip
        request = Request(str(number), prompt, options, priority=dice.randint(-1, 1))
        comes[dice.randint(0, 6)].append(request)
        stops[request.request_id] = dice.choice([99, 99, dice.randint(1, 6)])
    tokens: defaultdict[Key, list[int]] = defaultdict(list)
    reasons: dict[Key, str] = {}
    step = 0
    while engine.has_work or any(at >= step for at in comes):
        for request in comes.pop(step, ()):
            engine.add(request)
        for output in engine.step().outputs:
            key = output.request_id, output.choice
            assert output.index == len(tokens[key])
            tokens[key] += output.token_ids
            if output.finish is not None:
                reasons[key] = output.finish.reason
            elif len(tokens[key]) == stops[output.request_id]:
                engine.finish(*key)
        engine.check()
        step += 1
    engine.land()
    assert engine.stats().free_blocks == SIZES["num_kv_blocks"]
    return Played(dict(tokens), reasons, engine.stats().preemptions)


def test_overlap_on_equals_overlap_off() -> None:
    preemptions = 0
    for seed in range(SCHEDULES):
        one_by_one, overlapped = play(seed, "eager", 1), play(seed, PACES[seed % 3], 2)
        assert overlapped.tokens == one_by_one.tokens, f"seed {seed}"
        assert overlapped.reasons == one_by_one.reasons, f"seed {seed}"
        preemptions += overlapped.preemptions
    assert preemptions > SCHEDULES // 20
    assert runner("lazy", 2).stand_in.replays > 100
