"""Token embeddings, and the product that turns hidden states into scores over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .linear import linear
from .matrix import Matrix


@dataclass(frozen=True, slots=True)
class Scores:
    """What the vocabulary scores for some rows, of which the first only asked for their best."""

    best: torch.Tensor  # int64 [num_best]: the id with the largest score, the lower one of equals
    scores: torch.Tensor  # float32 [rows - num_best, vocab]
    finite: torch.Tensor  # bool [rows]: whether all of a row's scores are; otherwise its best is any id


def embedding(token_ids: torch.Tensor, table: Matrix) -> torch.Tensor:
    """Give rows of `table` [vocab, hidden] for int64 token_ids [rows], each below vocab."""
    return table.plain.index_select(0, token_ids)


def score(
    hidden: torch.Tensor, rows: torch.Tensor, output: Matrix, num_best: int = 0, buffer: torch.Tensor | None = None
) -> Scores:
    """Score the vocabulary, the outputs of `output` [vocab, hidden], for hidden[rows], with int64 `rows`.

    buffer   float32 [at least rows - num_best, vocab], where the scores may be put

    For the first `num_best` rows only the best id is given: their scores need not be stored then, and with 50,000
    tokens and few layers writing and reading those takes longer than computing them.
    """
    del buffer  # torch's product makes a tensor of its own
    scores = linear(hidden.index_select(0, rows), output).float()
    finite = torch.isfinite(scores.sum(dim=1))  # one pass; a sum of finite scores does not overflow
    best = scores[:num_best].argmax(dim=1) if num_best else rows[:0]
    return Scores(best, scores[num_best:], finite)
