"""What sequences ask of their scores, collected for a step: against a count of every token, one at a time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headrace.engine.adjustments import adjustments, asks_for_adjustment
from headrace.engine.intake import Limits, sequences_of
from headrace.engine.sequence import Sequence
from headrace.engine.types import Request, SamplingOptions
from headrace.kernels.adjust import adjust

VOCAB = 50
LIMITS = Limits(VOCAB, frozenset({1, 2}), 1000, 1000, 16)
NUMBER = np.float32


def sequence(prompt: list[int], output: list[int], **options: object) -> Sequence:
    made = SamplingOptions(**{"temperature": 0.0, "max_tokens": 100, **options})  # type: ignore[arg-type]
    one = sequences_of(Request("a", tuple(prompt), made), LIMITS, 0)[0]
    one.token_ids += output
    return one


def anything(seed: int) -> Sequence:
    """A sequence that asks for some of all there is."""
    draw = random.Random(seed)
    options: dict[str, object] = {}
    if draw.random() < 0.5:
        options["repetition_penalty"] = draw.choice([0.3, 1.1, 1.7])
    if draw.random() < 0.5:
        options["presence_penalty"] = draw.choice([0.5, -1.1])
    if draw.random() < 0.5:
        options["frequency_penalty"] = draw.choice([0.1, -0.7])
    if draw.random() < 0.5:
        options["logit_bias"] = {draw.randrange(VOCAB): draw.choice([0.0, 0.3, -100.0, 100.0]) for _ in range(9)}
    if draw.random() < 0.5:
        options |= {"min_tokens": draw.choice([5, 40]), "stop_token_ids": (7, 8)}
    prompt, output = ([draw.randrange(20) for _ in range(draw.randrange(most))] for most in (30, 20))
    return sequence([3, *prompt], output, **options)


def plain(row: torch.Tensor, one: Sequence) -> torch.Tensor:
    """One token after the other, in float32 but for the penalties that are added up."""
    o, out = one.options, row.clone()
    output = one.token_ids[one.num_prompt_tokens :]
    for token in range(len(row)):
        x = NUMBER(row[token].item())
        if o.repetition_penalty != 1.0 and token in one.token_ids:
            factor = NUMBER(o.repetition_penalty)
            x = x / factor if x > 0 else x * factor
        if token in output:
            x -= NUMBER(o.presence_penalty + o.frequency_penalty * output.count(token))
        if token in o.logit_bias:
            x += NUMBER(o.logit_bias[token])
        if one.num_tokens < one.min_stop_len and token in one.stop_ids:
            x = NUMBER("-inf")
        out[token] = float(x)
    return out


def check(sequences: list[Sequence]) -> None:
    scores = torch.randn((len(sequences), VOCAB), generator=torch.Generator().manual_seed(0)) * 4
    want = torch.stack([plain(row, one) for row, one in zip(scores, sequences, strict=True)])
    asking = [row for row, one in enumerate(sequences) if asks_for_adjustment(one)]
    made = adjustments(sequences, asking, VOCAB)
    places = list(zip(made.row.tolist(), made.token.tolist(), strict=True))
    assert len(set(places)) == len(places), "a score is changed twice"
    adjust(scores, made)
    assert torch.equal(scores.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("seed", range(40))
def test_bits_of_one(seed: int) -> None:
    one = anything(seed)
    if asks_for_adjustment(one):
        check([one])


def test_bits_of_many_at_once() -> None:
    check([anything(seed) for seed in range(40)])


def test_nothing_to_change() -> None:
    one = sequence([5, 6], [], presence_penalty=1.0)
    assert asks_for_adjustment(one)
    assert len(adjustments([one], [0], VOCAB)) == 0
    check([one, sequence([5, 6], [7, 7], frequency_penalty=1.0)])


def test_only_what_somebody_asks_for_is_there() -> None:
    columns = {
        "factor": {"repetition_penalty": 1.1}, "subtract": {"presence_penalty": 0.1}, "bias": {"min_tokens": 9},
    }  # fmt: skip
    for name, options in columns.items():
        made = adjustments([sequence([5, 6], [7, 7], **options)], [0], VOCAB)
        assert [each for each in columns if getattr(made, each) is not None] == [name]
