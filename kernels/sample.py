"""Draws one token a row from scores over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .philox import token_words


@dataclass(frozen=True, slots=True)
class SampleParameters:
    """One value a row; all on the CPU."""

    temperature: torch.Tensor  # float32; 0 takes the best score, and the rest of the parameters does nothing
    top_k: torch.Tensor  # int32; 0 is off
    top_p: torch.Tensor  # float32; 1 is off
    min_p: torch.Tensor  # float32; 0 is off
    seed: torch.Tensor  # int64, any bits
    choice: torch.Tensor  # int64
    position: torch.Tensor  # int64: how many tokens stand before the one that is drawn


def sample(scores: torch.Tensor, parameters: SampleParameters) -> torch.Tensor:
    """Draw a token id for each row of `scores`, float32 [rows, vocab], left alone. Result: int64 [rows] on the CPU.

    In this order: divide by the temperature, keep the top_k best, of these keep the best until their probabilities
    reach top_p, of these drop what is less probable than min_p times the best, and draw. Among equal scores the lower
    id is the better. The draw is a race: the largest score + noise wins, with Gumbel noise that is a function of
    (seed, choice, position, token id) alone, so a row's token does not depend on the batch, and dropping a token
    changes no other's noise. Source of the race: https://arxiv.org/abs/1411.0030
    """
    rows = [_sample_row(scores[row], parameters, row) for row in range(len(scores))]
    return torch.tensor(rows, dtype=torch.int64)


def _sample_row(scores: torch.Tensor, parameters: SampleParameters, row: int) -> int:
    temperature = float(parameters.temperature[row])
    if temperature == 0.0:
        return int(scores.argmax())
    top = scores.max()
    if not torch.isfinite(top):
        return 0  # nothing to choose by
    scaled = (scores - top) / temperature
    cuts = int(parameters.top_k[row]), float(parameters.top_p[row]), float(parameters.min_p[row])
    ids = kept_ids(scaled, *cuts)
    noise = gumbel(int(parameters.seed[row]), int(parameters.choice[row]), int(parameters.position[row]), ids)
    return int(ids[(scaled[ids].double() + noise).argmax()])


def kept_ids(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Give the ids that the cuts leave, int64 [n], ascending, for one row of scores below their best, [vocab]."""
    order = scaled.argsort(descending=True, stable=True)
    if top_k:
        order = order[:top_k]
    weight = scaled[order].double().exp()
    if top_p < 1.0:
        before = weight.cumsum(0) - weight
        order = order[: int((before < top_p * weight.sum()).sum().clamp(min=1))]
    keep = weight[: len(order)] >= min_p
    return order[keep].sort().values  # by id, so that the first of equal ones is the lower id


def gumbel(seed: int, choice: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 [n], for int64 token_ids [n]. Finite: the uniform behind it is never 0 or 1."""
    uniform = (token_words(seed, choice, position, token_ids).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))
