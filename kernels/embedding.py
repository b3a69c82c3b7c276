"""Token embeddings, and the product that turns hidden states into scores over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .exact import exp
from .linear import linear
from .matrix import Matrix


@dataclass(frozen=True, slots=True)
class Asked:
    """Rows of hidden states for which the vocabulary, the outputs of `output` [vocab, hidden], is to be scored."""

    rows: torch.Tensor  # int64
    output: Matrix
    num_best: int = 0  # so many of them, the first, only ask for their best
    # float32 [at least rows - num_best, vocab]: where the scores may be put, and are where none only asks for its best
    buffer: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """What the vocabulary scores for some rows, of which the first only asked for their best."""

    best: torch.Tensor  # int64 [num_best]: the id with the largest score, the lower one of equals
    scores: torch.Tensor  # float32 [rows - num_best, vocab]
    finite: torch.Tensor  # bool [rows]: whether all of a row's scores are; otherwise its best is any id


def embedding(token_ids: torch.Tensor, table: Matrix, scale: float = 1.0) -> torch.Tensor:
    """Give rows of `table` [vocab, hidden], times `scale`, for int64 token_ids [rows], each below vocab.

    The product is taken in float32 and rounded to the table's dtype.
    """
    rows = table.plain.index_select(0, token_ids)
    return rows if scale == 1.0 else (rows.float() * scale).to(rows.dtype)


def score(hidden: torch.Tensor, asked: Asked) -> Scores:
    """Score the vocabulary for the rows of `hidden` [any, hidden] that are asked for.

    For the first `num_best` rows only the best id is given: their scores need not be stored then, and with 50,000
    tokens and few layers writing and reading those takes longer than computing them.
    """
    scores = placed(linear(hidden.index_select(0, asked.rows), asked.output), asked)
    finite = torch.isfinite(scores.sum(dim=1))  # one pass; a sum of finite scores does not overflow
    best = scores[: asked.num_best].argmax(dim=1) if asked.num_best else asked.rows[:0]
    return Scores(best, scores[asked.num_best :], finite)


def placed(product: torch.Tensor, asked: Asked) -> torch.Tensor:
    """Scores as float32: in the buffer, or a tensor of its own."""
    if asked.buffer is None or asked.num_best:
        return product.float()
    return asked.buffer[: len(product)].copy_(product)


def cap_scores(scores: torch.Tensor, divisor: float, soft_cap: float) -> None:
    """Make scores, float32 [rows, vocab], soft_cap · tanh(score / divisor / soft_cap), in place; 0 is no cap.

    None of it changes which score is the best.
    """
    scores /= divisor
    if soft_cap > 0.0:
        scores.copy_(soft_cap * (1.0 - 2.0 / (exp(scores * (2.0 / soft_cap)) + 1.0)))
