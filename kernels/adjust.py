"""Changes single scores as requests ask: penalties, biases and bans, for all rows of a step at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_BIAS = -0.0  # added to a score it changes no bit; +0 would change a score of -0


@dataclass(frozen=True, slots=True)
class Adjustments:
    """One entry for each score that changes, no two of the same (row, token). All on the CPU, [entries].

    An entry does all three, and what is not asked of it is a number that changes nothing; None: of no entry.
    """

    row: torch.Tensor  # int64, of the scores
    token: torch.Tensor  # int64
    factor: torch.Tensor | None  # float32: divides a score above 0, multiplies others; 1 changes nothing
    subtract: torch.Tensor | None  # float32: the presence penalty, and the frequency penalty for each time; 0
    bias: torch.Tensor | None  # float32: added; -inf bans the token whatever its score is; NO_BIAS

    def __len__(self) -> int:
        return len(self.token)


def adjust(scores: torch.Tensor, adjustments: Adjustments) -> None:
    """Change `scores`, float32 [rows, vocab], in place: factor, then subtract, then bias, each rounded to float32.

    A row's tokens are contiguous; rows may lie apart.
    """
    if not len(adjustments):
        return
    flat = scores.as_strided(((len(scores) - 1) * scores.stride(0) + scores.shape[1],), (1,))
    at = (adjustments.row * scores.stride(0) + adjustments.token).to(scores.device)
    factor, subtract, bias = (
        each if each is None else each.to(scores.device)
        for each in (adjustments.factor, adjustments.subtract, adjustments.bias)
    )
    values = flat.index_select(0, at)
    if factor is not None:
        values = torch.where(values > 0, values / factor, values * factor)
    if subtract is not None:
        values -= subtract
    if bias is not None:
        values = torch.where(bias == float("-inf"), bias, values + bias)
    flat.index_copy_(0, at, values)
