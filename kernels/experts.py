"""Feed-forward layers of which each row takes a few: a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .exact import exp
from .gated import Clamp, clamped_mul, silu_mul
from .linear import linear, padded_rows
from .lists import ints
from .matrix import Matrix

ROW_MULTIPLE = 64  # rows of an expert are padded to it: every count that `linear.row_multiple` may give divides it


@dataclass(frozen=True, slots=True)
class Mixture:
    """A layer's experts, one behind the other in each part, and how rows meet them."""

    gate_up: Matrix  # [experts·2·width, hidden]: of each expert the gate's outputs, then up's
    down: Matrix  # [experts·hidden, width]
    top_k: int  # experts of a row
    normalised: bool  # whether a row's weights are made to add up to one; else they are probabilities among all experts
    gate_up_bias: torch.Tensor | None = None  # [experts·2·width], and this and the next of the matrices' dtype
    down_bias: torch.Tensor | None = None  # [experts·hidden]
    clamp: Clamp | None = None  # None: the activation is `silu_mul`, else `clamped_mul`


def experts(x: torch.Tensor, scores: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """Give each row of x the weighted sum of what its `top_k` best experts make of it.

    x         [rows, hidden]
    scores    [rows, experts] of x's dtype, as the router gives them; of equal ones the lower expert is the better

    An expert is an activation between two products, each rounded to x's dtype. Weights, their products with what the
    experts give, and the sums of these from the best to the last are float32; the result [rows, hidden] is
    rounded once.
    A row's bits do not depend on the other rows. Source: https://arxiv.org/abs/2101.03961
    """
    chosen, weights = route(scores, mixture.top_k, mixture.normalised)
    count, hidden = scores.shape[1], x.shape[1]
    made = torch.zeros((*chosen.shape, hidden), dtype=torch.float32, device=x.device)
    for expert in sorted(set(ints(chosen.flatten()))):
        row, rank = torch.where(chosen == expert)
        rows = torch.zeros((padded_rows(len(row), ROW_MULTIPLE), hidden), dtype=x.dtype, device=x.device)
        rows[: len(row)] = x[row]
        made[row, rank] = _one(rows, mixture, expert, count)[: len(row)].float()
    total = torch.zeros((len(x), hidden), dtype=torch.float32, device=x.device)
    for rank in range(mixture.top_k):
        total += made[:, rank] * weights[:, rank : rank + 1]
    return total.to(x.dtype)


def route(scores: torch.Tensor, top_k: int, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each row, best first, int64 [rows, top_k], with their float32 weights."""
    wide = scores.float()
    chosen = wide.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    likely = exp(wide - wide.amax(dim=1, keepdim=True))
    weights = likely.gather(1, chosen)
    return chosen, weights / (weights if normalised else likely).sum(dim=1, keepdim=True)


def _one(rows: torch.Tensor, mixture: Mixture, expert: int, count: int) -> torch.Tensor:
    """What one of `count` experts makes of rows."""
    gate_up_bias, down_bias = (
        None if bias is None else bias.view(count, -1)[expert] for bias in (mixture.gate_up_bias, mixture.down_bias)
    )
    gate_up = linear(rows, _of_one(mixture.gate_up, expert, count), gate_up_bias)
    gated = silu_mul(gate_up) if mixture.clamp is None else clamped_mul(gate_up, mixture.clamp)
    return linear(gated, _of_one(mixture.down, expert, count), down_bias)


def _of_one(matrix: Matrix, expert: int, count: int) -> Matrix:
    """The part of a matrix of all experts that is one's."""
    outputs = matrix.outputs // count
    return Matrix(matrix.plain[expert * outputs : (expert + 1) * outputs], outputs, matrix.inputs)
