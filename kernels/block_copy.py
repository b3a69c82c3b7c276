"""Copies whole blocks of the KV cache, for sequences that part ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kv_layout import FLOAT8_LARGEST


def copy_blocks(cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block `source` over block `destination` for each (source, destination), in place and in every layer at once.

    cache is [layers, 2, num_blocks, block_size, kv_heads, width], in any layout. All sources are read before
    any destination is written; a destination must not occur twice.
    """
    sources, destinations = (
        torch.tensor(ids, dtype=torch.int64, device=cache.device) for ids in zip(*pairs, strict=True)
    )
    if cache.dtype in FLOAT8_LARGEST:
        cache = cache.view(torch.uint8)  # torch copies no float8 by index
    cache.index_copy_(2, destinations, cache.index_select(2, sources))
