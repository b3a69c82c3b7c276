"""Feed-forward layers of which each row takes a few: a mixture of experts."""

from __future__ import annotations

import torch

from .exact import exp
from .gated import silu_mul
from .linear import linear, padded_rows
from .lists import ints
from .matrix import Matrix

ROW_MULTIPLE = 64  # rows of an expert are padded to it: every count that `linear.row_multiple` may give divides it


def experts(
    x: torch.Tensor, scores: torch.Tensor, gate_up: Matrix, down: Matrix, top_k: int, normalised: bool
) -> torch.Tensor:
    """Give each row of x the weighted sum of what its `top_k` best experts make of it.

    x         [rows, hidden]
    scores    [rows, experts] of x's dtype, as the router gives them; of equal ones the lower expert is the better
    gate_up   [experts·2·width, hidden]: of each expert the gate's outputs, then up's
    down      [experts·hidden, width]
    normalised  whether a row's weights are made to add up to one; else they are the experts' probabilities among all

    An expert is `silu_mul` between two products, each rounded to x's dtype. Weights, their products with what the
    experts give, and the sums of these from the best to the last are float32; the result [rows, hidden] is
    rounded once.
    A row's bits do not depend on the other rows. Source: https://arxiv.org/abs/2101.03961
    """
    chosen, weights = route(scores, top_k, normalised)
    count, hidden = scores.shape[1], x.shape[1]
    made = torch.zeros((*chosen.shape, hidden), dtype=torch.float32, device=x.device)
    for expert in sorted(set(ints(chosen.flatten()))):
        row, rank = torch.where(chosen == expert)
        rows = torch.zeros((padded_rows(len(row), ROW_MULTIPLE), hidden), dtype=x.dtype, device=x.device)
        rows[: len(row)] = x[row]
        gated = silu_mul(linear(rows, _of_one(gate_up, expert, count)))
        made[row, rank] = linear(gated, _of_one(down, expert, count))[: len(row)].float()
    total = torch.zeros((len(x), hidden), dtype=torch.float32, device=x.device)
    for rank in range(top_k):
        total += made[:, rank] * weights[:, rank : rank + 1]
    return total.to(x.dtype)


def route(scores: torch.Tensor, top_k: int, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each row, best first, int64 [rows, top_k], with their float32 weights."""
    wide = scores.float()
    chosen = wide.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    likely = exp(wide - wide.amax(dim=1, keepdim=True))
    weights = likely.gather(1, chosen)
    return chosen, weights / (weights if normalised else likely).sum(dim=1, keepdim=True)


def _of_one(matrix: Matrix, expert: int, count: int) -> Matrix:
    """The part of a matrix of all experts that is one's."""
    outputs = matrix.outputs // count
    return Matrix(matrix.plain[expert * outputs : (expert + 1) * outputs], outputs, matrix.inputs)
