"""A whole step of the sampler by Triton's kernels: the tokens and log-probabilities of the torch path.

Tolerance of log-probabilities: that of kernels/gpu/logprobs.py, and torch's, which is smaller for so few scores
(tests/kernels/test_logprobs.py: 2⁻²⁴ · (60 / 8 + 13 + 4 · |log-probability|)).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.engine.intake import Limits, sequences_of
from headrace.engine.sampler import Sampled, Sampler
from headrace.engine.sequence import Sequence
from headrace.engine.types import Request, SamplingOptions
from headrace.kernels.backend import Backend
from headrace.kernels.logprobs import logprobs
from headrace.kernels.sample import sample
from tests.support.torch_rig import backend

VOCAB = 60
LIMITS = Limits(VOCAB, frozenset({1, 2}), 1000, 1000, 16)
MIXED: list[dict[str, object]] = [
    {}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.4}, {"temperature": 0.7, "top_k": 4, "seed": 1},
    {"temperature": 1.0, "top_p": 0.6, "presence_penalty": 1.0, "logprobs": 3}, {"logprobs": 0},
    {"temperature": 2.0, "min_p": 0.2, "seed": 9, "min_tokens": 50}, {"logit_bias": {4: 30.0}, "logprobs": 1},
    {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.3, "logprobs": 5}, {"temperature": 1.0, "logprobs": 20},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.9, "logit_bias": {8: -3.0, 11: 2.0}, "min_tokens": 9},
]  # fmt: skip


def sequences(output: tuple[int, ...]) -> list[Sequence]:
    made: list[Sequence] = []
    for options in MIXED:
        full = SamplingOptions(**{"temperature": 0.0, "max_tokens": 100, **options})  # type: ignore[arg-type]
        made += sequences_of(Request("a", (5, 6, 7), full), LIMITS, 0)
        made[-1].token_ids += output
    return made


def step(ops: Backend, seed: int) -> list[Sampled]:
    scores = torch.randn((len(MIXED), VOCAB), generator=torch.Generator().manual_seed(seed)) * 3
    return Sampler(ops).sample(scores, sequences(tuple(8 + at % 5 for at in range(seed))))


def check(ops: Backend) -> None:
    for seed in range(6):
        for got, want in zip(step(ops, seed), step(backend("torch"), seed), strict=True):
            assert got.token_id == want.token_id
            assert (got.logprobs is None) == (want.logprobs is None)
            for (token, value), (expected, exact) in zip(got.logprobs or (), want.logprobs or (), strict=True):
                assert token == expected
                assert abs(value - exact) <= 2.0**-17 + 2.0**-23 * abs(exact) + 2.0**-24 * (21 + 4 * abs(exact))


def test_a_step_with_mixed_options_is_that_of_torch() -> None:
    check(backend("triton"))


@pytest.mark.parametrize("operation", ["adjust", "logprobs", "sample"])
def test_a_step_uses_the_operations_of_its_backend(operation: str) -> None:
    """One that does something else is seen."""

    def biased(scores: torch.Tensor, made: object) -> None:
        del made
        scores[:, 33] += 9.0

    others = {
        "adjust": biased,
        "logprobs": lambda scores, *asked: logprobs(scores * 1.01, *asked),
        "sample": lambda scores, asked: sample(scores * 0.5, asked),
    }
    with pytest.raises(AssertionError):
        check(dataclasses.replace(backend("triton"), **{operation: others[operation]}))


def test_log_probabilities_of_a_prompt() -> None:
    scores = torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(1)) * 3
    got, want = (
        Sampler(backend(name)).token_logprobs(scores, [4, 59, 0, 1, 2], [3] * 5) for name in ("triton", "torch")
    )
    assert [[token for token, _ in row] for row in got] == [[token for token, _ in row] for row in want]
    assert torch.tensor(got).sub(torch.tensor(want)).abs().max() < 2.0**-16
