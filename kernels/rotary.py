"""Rotary position embedding, and in the same pass the store of keys and values into their blocks."""

from __future__ import annotations

import torch

from .kv_layout import cached_head_dim, encode


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values into the cache, and give the queries.

    qkv        [rows, (heads + 2·kv_heads)·head_dim]: queries, then keys, then values; left alone
    positions  int64 [rows], each below cos_sin's rows
    cos_sin    float32 [max_model_len, head_dim]: the cosines of head_dim/2 angles, then their sines
    k_cache, v_cache  [num_blocks, block_size, kv_heads, width] in float32, bfloat16 or int8, see `kv_layout`; written
                      in place. This function takes the layout by_position
    slots      int64 [rows]: block · block_size + offset; a negative slot writes nothing

    Result: [rows, heads, head_dim] of qkv's dtype. Arithmetic is float32. Source: https://arxiv.org/abs/2104.09864,
    in the layout of Llama checkpoints, where value i turns with value i + head_dim/2.
    """
    kv_heads, width = k_cache.shape[-2:]
    head_dim = cached_head_dim(k_cache)
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    query, key, value = torch.split(qkv.view(len(qkv), -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    live = slots >= 0
    at = slots[live]
    k_cache.view(-1, kv_heads, width)[at] = encode(_rotate(key, cos, sin)[live], k_cache.dtype)
    v_cache.view(-1, kv_heads, width)[at] = encode(value[live].float(), v_cache.dtype)
    return _rotate(query, cos, sin).to(qkv.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
