"""The KV cache of a model: one tensor for each group of layers that share their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .attention import Paging
from .kv_layout import cached_head_dim


class Placement(NamedTuple):
    """Where the rows of a step, and what they see, are in the blocks of one group."""

    slots: torch.Tensor  # int64 [rows]: block · block_size + offset, or -1 for a row that is stored nowhere
    paging: Paging


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of all layers.

    groups  each [layers of the group, 2, num_blocks, block_size, kv_heads, width], see `kv_layout`; only num_blocks and
            the number of layers differ
    places  of each layer: its group, and its number there
    scales  float32 [layers, 2, kv_heads], of keys and of values: what a cache of float8 comes with, and no other
    """

    groups: tuple[torch.Tensor, ...]
    places: Sequence[tuple[int, int]]
    scales: torch.Tensor | None = None

    @property
    def kv_heads(self) -> int:
        """Key-value heads of every layer."""
        return self.groups[0].shape[-2]

    @property
    def head_dim(self) -> int:
        """Size of each head."""
        return cached_head_dim(self.groups[0])

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.groups[0].device

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each [num_blocks, block_size, kv_heads, width]."""
        group, index = self.places[number]
        keys, values = self.groups[group][index]
        return keys, values

    def layer_scales(self, number: int) -> torch.Tensor | None:
        """Scales of a layer, float32 [2, kv_heads]."""
        return None if self.scales is None else self.scales[number]


def one_group(tensor: torch.Tensor) -> KvCache:
    """A cache whose layers all share their blocks."""
    return KvCache((tensor,), [(0, layer) for layer in range(len(tensor))])
