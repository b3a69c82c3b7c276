"""What a token costs outside the model, counted in function calls: the same on every machine, busy or not."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from headrace.engine.engine import Engine
from headrace.engine.types import EngineConfig, Plan, Request, RowResult, SamplingOptions


class NullRunner:
    """Answers at once, always with the same token."""

    vocab_size, eos_token_ids, max_model_len, num_blocks, block_size = 300, frozenset({0}), 4096, 4096, 16
    window = num_window_blocks = 0

    def run(self, plan: Plan) -> list[RowResult]:
        return [RowResult(5)] * len(plan.rows)


def calls_per_token(num_seqs: int, waiting: int = 0) -> float:
    """Python and C calls per sampled token over 32 steps, two blocks, in which `num_seqs` sequences decode."""
    engine = Engine(NullRunner(), EngineConfig(num_seqs, 8192))
    for number in range(num_seqs + waiting):
        engine.add(Request(f"r{number}", (number % 300,) * 20, SamplingOptions(max_tokens=200)))
    for _ in range(4):
        engine.step()
    calls = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        for _ in range(32):
            engine.step()
    finally:
        sys.setprofile(None)
    assert engine.stats().running == num_seqs
    return calls / (32 * num_seqs)


def test_the_cost_of_a_token_is_small_and_does_not_grow_with_the_batch() -> None:
    """Nothing may walk all sequences for each of them, or sort them for each step."""
    small, large = calls_per_token(16), calls_per_token(256)
    assert large <= small
    assert large < 18


@pytest.mark.parametrize("waiting", [1, 500])
def test_those_who_wait_for_a_place_cost_the_running_ones_nothing(waiting: int) -> None:
    assert calls_per_token(64, waiting) < calls_per_token(64) + 0.5
