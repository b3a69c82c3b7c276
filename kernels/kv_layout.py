"""How keys and values lie in a block of the cache, and what a cached vector is made of.

To everything but the kernels a layer's keys, and its values, are a tensor [num_blocks, block_size, kv_heads, width] of
which only whole blocks are moved. width is head_dim; in an int8 cache it is head_dim + 4 bytes, because a vector of
int8 comes with a float32 scale: value = int8 · scale, scale = max|value| / 127. A cache of float8 has scales beside it,
one for each head of a layer's keys and of its values: value = float8 · scale. Inside a block a backend chooses:

by_position   as the shape says, a scale behind its vector; what the plain torch operations read
by_head       a head's part of the block lies together: keys [kv_heads][head_dim / t][block_size][t], where t is 2 in
              bfloat16 and 1 otherwise, so that a load brings one dimension, or a pair, of neighbouring positions;
              values [kv_heads][block_size][head_dim]; in int8 the scales [kv_heads][block_size] come after all of them
by_head_rows  as by_head, but keys lie as values do
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

KvLayout = Literal["by_position", "by_head", "by_head_rows"]
SCALE_BYTES = 4
LARGEST = 127  # of the int8 values in use; -128 is none of them
FLOAT8_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def cached_width(head_dim: int, dtype: torch.dtype) -> int:
    """Give the last dimension of a cache for vectors of head_dim values."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def cached_head_dim(cache: torch.Tensor) -> int:
    """Give head_dim of a cache [..., width]."""
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def encode(vectors: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Bring float32 vectors [..., head_dim] into the form [..., width] of a by_position cache.

    scales are those of a float8 cache, float32 [kv_heads] where vectors is [..., kv_heads, head_dim]. What is too large
    for float8 becomes its largest value. A vector of int8 with a value that is not finite gets a scale that is not
    finite, and decodes to such values throughout; in float8 such a value becomes NaN.
    """
    if dtype in FLOAT8_LARGEST:
        most = FLOAT8_LARGEST[dtype]
        scaled = vectors / needed_scales(scales)[:, None]
        return torch.where(scaled.isfinite(), scaled.clamp(-most, most), torch.nan).to(dtype)
    if dtype != torch.int8:
        return vectors.to(dtype)
    largest = vectors.abs().amax(-1, keepdim=True) + 0.0 * vectors.sum(-1, keepdim=True)  # NaN where not all are finite
    steps = vectors * torch.where(largest > 0, LARGEST / largest, 0.0)
    whole = steps.nan_to_num(0.0).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return torch.cat((whole, (largest / LARGEST).contiguous().view(torch.int8)), dim=-1)


def decode(cached: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Give the float32 vectors [..., head_dim] of by_position vectors [..., width]; scales as in `encode`."""
    if cached.dtype in FLOAT8_LARGEST:
        return cached.float() * needed_scales(scales)[:, None]
    if cached.dtype != torch.int8:
        return cached.float()
    head_dim = cached_head_dim(cached)
    scale = cached[..., head_dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return cached[..., :head_dim].float() * scale


def needed_scales(scales: torch.Tensor | None) -> torch.Tensor:
    """Give the scales of a float8 cache. Raises ValueError where there are none: none is not the same as ones."""
    if scales is None:
        raise ValueError("a KV cache of float8 needs kv_scales, float32 [2, kv_heads]")
    return scales


def float8_scales(cached: torch.dtype, scales: torch.Tensor | None) -> torch.Tensor | None:
    """The scales that go with a cache of this type: those of a float8 cache, as `needed_scales`, and else None."""
    return needed_scales(scales) if cached in FLOAT8_LARGEST else None


def laid_out(cache: torch.Tensor, layout: KvLayout, *, keys: bool) -> torch.Tensor:
    """Copy a by_position cache [num_blocks, block_size, kv_heads, width] of keys, or of values, into a layout."""
    if layout == "by_position":
        return cache.clone()
    head_dim = cached_head_dim(cache)
    vectors, scales = cache[..., :head_dim], cache[..., head_dim:]
    in_pairs = keys and layout == "by_head"
    parts = [
        _key_pairs(vectors).permute(0, 2, 3, 1, 4) if in_pairs else vectors.transpose(1, 2),
        scales.transpose(1, 2),
    ]
    return torch.cat([part.reshape(len(cache), -1) for part in parts], dim=1).view(cache.shape)


def by_position(cache: torch.Tensor, layout: KvLayout, *, keys: bool) -> torch.Tensor:
    """Copy a cache of keys, or of values, in some layout into by_position: what `laid_out` undoes."""
    if layout == "by_position":
        return cache.clone()
    blocks, block_size, kv_heads, width = cache.shape
    head_dim = cached_head_dim(cache)
    size = block_size * kv_heads * head_dim
    flat = cache.reshape(blocks, -1)
    vectors, scales = flat[:, :size], flat[:, size:].reshape(blocks, kv_heads, block_size, width - head_dim)
    if keys and layout == "by_head":
        together = _together(cache)
        pairs = vectors.reshape(blocks, kv_heads, head_dim // together, block_size, together).permute(0, 3, 1, 2, 4)
        vectors = pairs.reshape(blocks, block_size, kv_heads, head_dim)
    else:
        vectors = vectors.reshape(blocks, kv_heads, block_size, head_dim).transpose(1, 2)
    return torch.cat((vectors, scales.transpose(1, 2)), dim=-1)


def poison(cache: torch.Tensor, block_ids: Sequence[int]) -> None:
    """Make every vector in whole blocks NaN, in place and in any layout. cache [layers, 2, num_blocks, …]. For tests.

    All bits set is NaN in every float type; an int8 vector has it from its scale.
    """
    cache.view(torch.uint8)[:, :, list(block_ids)] = 255


def _together(cache: torch.Tensor) -> int:
    return 2 if cache.dtype == torch.bfloat16 else 1


def _key_pairs(vectors: torch.Tensor) -> torch.Tensor:
    together = _together(vectors)
    return vectors.reshape(*vectors.shape[:-1], vectors.shape[-1] // together, together)
