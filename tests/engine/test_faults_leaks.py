"""Nothing is left of requests that are over: not in the engine, the scheduler, the cache, the runner or the sampler."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from headrace.engine.engine import Engine
from headrace.engine.sequence import Sequence
from headrace.engine.types import EngineConfig, Request, SamplingOptions
from tests.support.checkpoints import Shape
from tests.support.leftovers import alive, num_reachable
from tests.support.scripted import ScriptedRunner
from tests.support.torch_rig import rig

NUM_BLOCKS, BLOCK_SIZE = 48, 4
VOCAB = 260


def random_request(rng: random.Random, name: str) -> Request:
    """Any options, also those that make a request wait, share, fork, end early or go on after an earlier attempt."""
    n = rng.choice((1, 1, 1, 2, 3))
    sampled = rng.random() < 0.5
    options = SamplingOptions(
        max_tokens=rng.choice((1, 2, 3, 4, 5, 5, 40)),
        min_tokens=rng.randint(0, 1),
        temperature=rng.choice((0.7, 1.3)) if sampled else 0.0,
        top_p=rng.choice((1.0, 0.8)),
        top_k=rng.choice((0, 3)),
        min_p=rng.choice((0.0, 0.1)),
        repetition_penalty=rng.choice((1.0, 1.2)),
        presence_penalty=rng.choice((0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, -0.5)),
        logit_bias={rng.randrange(VOCAB): 3.0} if rng.random() < 0.2 else {},
        seed=rng.randrange(1 << 63),
        stop_token_ids=(rng.randrange(VOCAB),) if rng.random() < 0.3 else (),
        ignore_eos=rng.random() < 0.3,
        n=n,
        logprobs=rng.choice((None, None, 2)),
        prompt_logprobs=rng.choice((None, None, None, 1)),
    )
    prompt = (*range(rng.randrange(9)), rng.randrange(200))
    settled = tuple((5,) * rng.randrange(2) for _ in range(n)) if rng.random() < 0.1 and options.max_tokens > 2 else ()
    salt = f"salt {rng.randrange(300)}" if rng.random() < 0.3 else ""
    return Request(name, prompt, options, settled, priority=rng.randint(-1, 1), cache_salt=salt)


def serve(engine: Engine, rng: random.Random, prefix: str, count: int) -> None:
    """Run random requests; every seventh or so is cancelled, and some choices are ended from outside."""
    added = 0
    while added < count or engine.has_work:
        while added < count and engine.room():
            try:
                engine.add(random_request(rng, f"{prefix}{added}"))
            except ValueError as error:  # its settled token was a stop token
                assert "has ended already" in str(error)
            added += 1
        engine.step()
        if rng.random() < 0.3:
            engine.abort(f"{prefix}{added - rng.randint(1, 9)}")
        if rng.random() < 0.2:
            engine.finish(f"{prefix}{added - rng.randint(1, 9)}", 0)


def sweep(engine: Engine) -> None:
    """One request that fills the pool: afterwards the cache holds nothing but its blocks, always the same."""
    num_tokens = NUM_BLOCKS * BLOCK_SIZE - 1
    engine.add(Request("sweep", tuple(index % 7 for index in range(num_tokens)), SamplingOptions(max_tokens=1)))
    while engine.has_work:
        engine.step()
    engine.check()
    if isinstance(engine.runner, ScriptedRunner):
        engine.runner._tables.clear()  # the judge's own notes


def assert_nothing_left(engine: Engine, prefix: str) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting, engine.requests, stats.free_blocks) == (0, 0, 0, NUM_BLOCKS)
    assert stats.cached_blocks == NUM_BLOCKS - 1
    assert len(engine.free_block_ids()) == 1
    cache = engine._blocks.cache
    assert cache is not None
    assert len(cache._roots) == 1
    left = alive((Sequence, Request), prefix)
    assert left == [], f"{len(left)} objects outlive their requests: {left[:3]}"


def scripted() -> Engine:
    runner = ScriptedRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=200)
    return Engine(runner, EngineConfig(max_num_seqs=16, max_num_batched_tokens=64))


def scripted_with_windows() -> Engine:
    runner = ScriptedRunner(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=200, window=9, num_window_blocks=NUM_BLOCKS
    )
    return Engine(runner, EngineConfig(max_num_seqs=16, max_num_batched_tokens=64))


def on_a_model() -> Engine:
    shape = Shape(hidden=32, heads=2, kv_heads=1, middle=48, vocab=VOCAB)
    made = rig(
        shape, block_size=BLOCK_SIZE, num_kv_blocks=NUM_BLOCKS, max_model_len=200, max_num_seqs=16,
        max_num_batched_tokens=64,
    )  # fmt: skip
    made.runner.on_logits = None
    return made.engine


@pytest.mark.parametrize(("make", "count"), [(scripted, 10_000), (scripted_with_windows, 2_000), (on_a_model, 400)])
def test_random_requests_and_cancels_leave_nothing(make: Callable[[], Engine], count: int) -> None:
    engine = make()
    rng = random.Random(11)
    serve(engine, rng, "early-", count // 20)
    sweep(engine)
    assert_nothing_left(engine, "early-")
    few = num_reachable(engine)
    serve(engine, rng, "leak-", count)
    assert engine.stats().preemptions > 0
    sweep(engine)
    assert_nothing_left(engine, "leak-")
    assert num_reachable(engine) == few, "something grows with the number of requests"


def test_the_count_sees_a_table_that_is_never_emptied() -> None:
    engine = scripted()
    runner: Any = engine.runner
    sweep(engine)
    before = num_reachable(engine)
    runner.kept = {f"leak-{number}": [number] for number in range(50)}
    assert num_reachable(engine) == before + 51
    kept = Request("leak-1", (1,))
    assert alive((Request,), "leak-") == [kept]
