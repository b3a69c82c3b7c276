"""Sizes and settings that the attention kernels share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG2_E = 1.4426950408889634
SPLIT, MOST_SPLITS = 256, 64


@dataclass(frozen=True, slots=True)
class Attention:
    """How a layer attends; see `attention.paged_attention`."""

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    kv_scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where the parts of a decode step wait to be merged, made once for an engine, used by one layer after the other.

    Keys are split at multiples of `split` positions, counted from position 0: a sequence's splits, and the order in
    which they are merged, depend on nothing but its own length, and so do its bits.
    """

    parts: torch.Tensor  # float32 [sequences, heads, splits, head_dim]: a split's own softmax · values
    lse: torch.Tensor  # float32 [sequences, heads, splits]: log2 of the sum of its weights, its largest score included
    split: int  # positions, a multiple of every tile

    @property
    def num_splits(self) -> int:
        """The most that a sequence may have."""
        return self.parts.shape[2]


def split_for(positions: int) -> int:
    """Positions of a split, where a sequence may have so many: SPLIT, or so many that MOST_SPLITS are enough."""
    split = SPLIT
    while -(-positions // split) > MOST_SPLITS:
        split *= 2
    return split


def make_scratch(max_seqs: int, heads: int, head_dim: int, positions: int, device: torch.device) -> Scratch:
    """Scratch for so many sequences of up to so many positions."""
    split = split_for(positions)
    shape = (max_seqs, heads, -(-positions // split))
    parts, lse = (torch.empty(each, dtype=torch.float32, device=device) for each in ((*shape, head_dim), shape))
    return Scratch(parts, lse, split)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
