"""Makes the KV cache of a model: memory for the blocks of each kind of layers, and what float8 values are scaled by."""

from __future__ import annotations

import torch

from ..kernels.kv_cache import KvCache
from ..kernels.kv_layout import cached_width
from ..kernels.large_pages import zeros_in_large_pages
from .passes import KvShape


def make_cache(
    kv: KvShape,
    num_blocks: int,
    num_window_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    scales: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> KvCache:
    """Memory for so many blocks of the layers that see all, and of those with a window.

    device  None: the CPU, which takes memory as it is written
    scales  float32 [layers, 2, kv_heads] of a float8 cache, see `kv_scales`
    """
    vectors = (block_size, kv.num_kv_heads, cached_width(kv.head_dim, dtype))
    numbers = {
        False: (kv.num_layers - kv.num_windowed, 2, num_blocks),
        True: (kv.num_windowed, 2, num_window_blocks),
    }
    shapes = [(*numbers[kind], *vectors) for kind in kv.kinds]
    if device is None or device.type == "cpu":
        groups = tuple(zeros_in_large_pages(shape, dtype) for shape in shapes)
    else:
        groups = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
    return KvCache(groups, kv.places, scales)
