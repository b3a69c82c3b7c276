"""Rotary position embedding, and in the same pass what stands around it.

That is the norm of queries and keys before it, and the store of keys and values into their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .kv_layout import FLOAT8_LARGEST, cached_head_dim, encode
from .rms_norm import normed


@dataclass(frozen=True, slots=True)
class QueryKeyNorm:
    """Norms of queries and keys before they are rotated, as `rms_norm` has them.

    Weights of [head_dim] values norm each head by itself; those of [heads·head_dim] and [kv_heads·head_dim] norm all
    heads of a row together. With one head for each, that is the same.
    """

    query: torch.Tensor  # float32
    key: torch.Tensor  # float32
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a layer's queries and keys come to their final form."""

    table: int | None = 0  # number of the model's rotary table; None where positions change nothing
    norm: QueryKeyNorm | None = None


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    norm: QueryKeyNorm | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate queries and keys, write keys and values into the cache, and give the queries.

    qkv        [rows, (heads + 2·kv_heads)·head_dim]: queries, then keys, then values; left alone
    positions  int64 [rows], each below cos_sin's rows
    cos_sin    float32 [max_model_len, rotary_dim]: the cosines of rotary_dim/2 angles, then their sines. The first
               rotary_dim ≤ head_dim values of each head turn, the others stay; None turns nothing
    k_cache, v_cache  [num_blocks, block_size, kv_heads, width] in one of the types of `kv_layout`; written in place.
                      This function takes the layout by_position
    slots      int64 [rows]: block · block_size + offset; a negative slot writes nothing
    norm       of queries and keys, before they turn
    kv_scales  float32 [2, kv_heads], of keys and of values: what float8 caches come with, and no others

    Result: [rows, heads, head_dim] of qkv's dtype. Arithmetic is float32, without rounding between norm and rotation.
    Source: https://arxiv.org/abs/2104.09864, in the layout of Llama checkpoints, where value i turns with value
    i + rotary_dim/2.
    """
    kv_heads, width = k_cache.shape[-2:]
    head_dim = cached_head_dim(k_cache)
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    query, key, value = torch.split(qkv.view(len(qkv), -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        query, key = _normed(query, norm.query, norm.eps), _normed(key, norm.key, norm.eps)
    query, key = query.float(), key.float()
    if cos_sin is not None:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    live = slots >= 0
    at = slots[live]
    for number, (cache, vectors) in enumerate(((k_cache, key), (v_cache, value.float()))):
        scales = None if kv_scales is None else kv_scales[number]
        whole = cache.view(-1, kv_heads, width)
        stored = encode(vectors[live], cache.dtype, scales)
        same_size = torch.uint8 if cache.dtype in FLOAT8_LARGEST else cache.dtype  # torch indexes no float8
        whole.view(same_size)[at] = stored.view(same_size)
    return query.to(qkv.dtype).contiguous()


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, heads, head_dim], head by head or as whole rows, as the weight's length says."""
    together = x.contiguous().view(len(x), -1, len(weight))
    return normed(together, weight, eps).view(x.shape)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
