"""Token embeddings, and the product that turns hidden states into scores over the vocabulary."""

from __future__ import annotations

import torch

from .linear import linear


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Give rows of `table` [vocab, hidden] for int64 token_ids [rows], each below vocab."""
    return table.index_select(0, token_ids)


def logits(hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Give float32 scores [rows, vocab] for hidden [rows, hidden] and the output table [vocab, hidden]."""
    return linear(hidden, output).float()
