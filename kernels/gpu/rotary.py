"""Norm and rotation of queries and keys, and the store of keys and values into their blocks, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kv_layout import SCALE_BYTES, cached_head_dim, float8_scales
from ..rotary import QueryKeyNorm
from .encode import INT8_LARGEST, INT8_SCALE_BYTES, encoded, largest_size
from .shapes import power_of_two

_TILE = 1024  # values of a program, unless the heads of a row are normed together
_PER_THREAD = 16
_MOST_WARPS = 16
_HEADS_ALONE, _HEADS_TOGETHER = 1, 2  # norms; 0 is none
_ALONE = tl.constexpr(_HEADS_ALONE)


@triton.jit
def _load(pointer, head, count, HEAD_DIM: tl.constexpr, BEGIN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Values [BEGIN, BEGIN + SIZE) of some heads, float32 [heads, BLOCK]; 0 beyond them, and from head `count` on."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < count) & (column < SIZE)
    return tl.load(pointer + head * HEAD_DIM + BEGIN + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _prepared(
    pointer,
    cos_sin_ptr,
    weight_ptr,
    eps,
    head,
    count,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Some heads of a row, normed and turned: the halves that turn, and the rest, each float32 [heads, block]."""
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    first = _load(pointer, head, count, HEAD_DIM, 0, HALF, HALF_BLOCK)
    second = _load(pointer, head, count, HEAD_DIM, HALF, HALF, HALF_BLOCK)
    rest = _load(pointer, head, count, HEAD_DIM, 2 * HALF, REST, REST_BLOCK)
    if NORM:
        square = (tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1))[:, None]
        if NORM == _ALONE:
            mean, head, count = square / HEAD_DIM, 0, 1  # one weight for every head
        else:
            mean = tl.sum(square, 0)[None, :] / (count * HEAD_DIM)
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        first = first * scale * _load(weight_ptr, head, count, HEAD_DIM, 0, HALF, HALF_BLOCK)
        second = second * scale * _load(weight_ptr, head, count, HEAD_DIM, HALF, HALF, HALF_BLOCK)
        rest = rest * scale * _load(weight_ptr, head, count, HEAD_DIM, 2 * HALF, REST, REST_BLOCK)
    if HALF:
        cos = _load(cos_sin_ptr, 0, 1, HEAD_DIM, 0, HALF, HALF_BLOCK)
        sin = _load(cos_sin_ptr, 0, 1, HEAD_DIM, HALF, HALF, HALF_BLOCK)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    return first, second, rest


@triton.jit
def _store(
    pointer,
    head,
    live,
    first,
    second,
    rest,
    by,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
):
    """Put what `_prepared` gives where `live` [heads, 1] says; a head's values lie together."""
    KIND: tl.constexpr = pointer.dtype.element_ty
    at = pointer + head * HEAD_STRIDE
    if HALF:
        column = tl.arange(0, HALF_BLOCK)[None, :]
        inside = live & (column < HALF)
        tl.store(at + column, encoded(first, by, KIND), mask=inside)
        tl.store(at + HALF + column, encoded(second, by, KIND), mask=inside)
    if HEAD_DIM > 2 * HALF:
        column = tl.arange(0, REST_BLOCK)[None, :]
        tl.store(at + 2 * HALF + column, encoded(rest, by, KIND), mask=live & (column < HEAD_DIM - 2 * HALF))


@triton.jit
def _store_cached(
    cache_ptr,
    scales_ptr,
    slot,
    head,
    first,
    second,
    rest,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Put vectors into their block as `kv_layout.encode` makes them, in the layout by_head_rows."""
    KIND: tl.constexpr = cache_ptr.dtype.element_ty
    VALUES: tl.constexpr = BLOCK_SIZE * KV_HEADS * HEAD_DIM
    live = head < tl.where(slot >= 0, KV_HEADS, 0)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    by = 1.0
    if KIND == tl.int8:
        cache_ptr += block * (VALUES + BLOCK_SIZE * KV_HEADS * INT8_SCALE_BYTES)
        largest = tl.maximum(largest_size(rest), 0.0, propagate_nan=tl.PropagateNan.ALL)
        if HALF:
            largest = tl.maximum(largest, largest_size(first), propagate_nan=tl.PropagateNan.ALL)
            largest = tl.maximum(largest, largest_size(second), propagate_nan=tl.PropagateNan.ALL)
        by = tl.where(largest > 0.0, tl.div_rn(INT8_LARGEST, largest), 0.0)
        at = (cache_ptr + VALUES).to(tl.pointer_type(tl.float32)) + head * BLOCK_SIZE + offset
        tl.store(at, tl.div_rn(largest, INT8_LARGEST), mask=live)
    else:
        cache_ptr += block * VALUES
        if scales_ptr is not None:
            by = tl.load(scales_ptr + head, mask=head < KV_HEADS, other=1.0)
    _store(
        cache_ptr + offset * HEAD_DIM, head, live, first, second, rest, by,
        HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, BLOCK_SIZE * HEAD_DIM,
    )  # fmt: skip


@triton.jit
def _rotate_and_store(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    query_weight_ptr,
    key_weight_ptr,
    kv_scales_ptr,
    out_ptr,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """A tile of a row's heads. grid: (rows, query tiles + key tiles + value tiles).

    qkv [rows, (HEADS + 2·KV_HEADS)·HEAD_DIM] and out [rows, HEADS, HEAD_DIM] of one type; positions and slots int64
    [rows]; cos_sin float32 [positions, 2·HALF]; caches [blocks, BLOCK_SIZE, KV_HEADS, width] by_head_rows; weights
    float32 [HEAD_DIM], or of all heads for a norm of them together; kv_scales float32 [2, KV_HEADS]. HALF_BLOCK,
    REST_BLOCK and HEAD_BLOCK are powers of two that hold half of what turns, what does not turn, and a head.
    """
    QUERY_PARTS: tl.constexpr = (HEADS + QUERY_TILE - 1) // QUERY_TILE
    KV_PARTS: tl.constexpr = (KV_HEADS + KV_TILE - 1) // KV_TILE
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    qkv_ptr += row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    if HALF:
        cos_sin_ptr += tl.load(positions_ptr + row) * (2 * HALF)
    # each branch has names of its own, because Triton wants one type for what both sides of an `if` assign
    if part < QUERY_PARTS:
        query = part * QUERY_TILE + tl.arange(0, QUERY_TILE)[:, None]
        q_first, q_second, q_rest = _prepared(
            qkv_ptr, cos_sin_ptr, query_weight_ptr, eps, query, HEADS,
            HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, QUERY_NORM,
        )  # fmt: skip
        _store(
            out_ptr + row * (HEADS * HEAD_DIM), query, query < HEADS, q_first, q_second, q_rest, 1.0,
            HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, HEAD_DIM,
        )  # fmt: skip
    elif part < QUERY_PARTS + KV_PARTS:
        key = (part - QUERY_PARTS) * KV_TILE + tl.arange(0, KV_TILE)[:, None]
        k_first, k_second, k_rest = _prepared(
            qkv_ptr + HEADS * HEAD_DIM, cos_sin_ptr, key_weight_ptr, eps, key, KV_HEADS,
            HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, KEY_NORM,
        )  # fmt: skip
        _store_cached(
            k_cache_ptr, kv_scales_ptr, tl.load(slots_ptr + row), key, k_first, k_second, k_rest,
            KV_HEADS, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, BLOCK_SIZE,
        )  # fmt: skip
    else:
        if kv_scales_ptr is not None:
            kv_scales_ptr += KV_HEADS
        value = (part - QUERY_PARTS - KV_PARTS) * KV_TILE + tl.arange(0, KV_TILE)[:, None]
        none, _, whole = _prepared(
            qkv_ptr + (HEADS + KV_HEADS) * HEAD_DIM, None, None, eps, value, KV_HEADS, HEAD_DIM, 0, 1, HEAD_BLOCK, 0
        )
        _store_cached(
            v_cache_ptr, kv_scales_ptr, tl.load(slots_ptr + row), value, none, none, whole,
            KV_HEADS, HEAD_DIM, 0, 1, HEAD_BLOCK, BLOCK_SIZE,
        )  # fmt: skip


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
    """`rotary.rotate_and_store` for caches in the layout by_head_rows, in one launch.

    qkv is float32, bfloat16 or float16; kv_scales is float32. A row's bits depend on nothing but the row. Tensors that
    do not begin at a multiple of 16 bytes are compiled for once more. Raises ValueError for a float8 cache without
    kv_scales, for a cache whose blocks do not lie one behind the other, for scales of int8 at addresses that are no
    multiple of four, and for weights that norm neither each head nor all.
    """
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the blocks of a cache must lie one behind the other")
    if k_cache.dtype == torch.int8 and (k_cache[0].numel() % SCALE_BYTES or k_cache.data_ptr() % SCALE_BYTES):
        raise ValueError("a block of an int8 cache must be a multiple of four bytes, as with a block_size of 4 or more")
    sizes = _sizes(qkv, cos_sin, k_cache, norm)
    parts = triton.cdiv(sizes["HEADS"], sizes["QUERY_TILE"]) + 2 * triton.cdiv(sizes["KV_HEADS"], sizes["KV_TILE"])
    out = qkv.new_empty(len(qkv), sizes["HEADS"], sizes["HEAD_DIM"])
    if len(qkv):
        _rotate_and_store[(len(qkv), parts)](
            qkv.contiguous(),
            positions.contiguous(),
            None if cos_sin is None else cos_sin.contiguous(),
            k_cache,
            v_cache,
            slots.contiguous(),
            None if norm is None else norm.query,
            None if norm is None else norm.key,
            float8_scales(k_cache.dtype, kv_scales),
            out,
            0.0 if norm is None else norm.eps,
            **sizes,
            enable_fp_fusion=False,  # so that what is turned, and rounded in two steps, has the reference's bits
        )
    return out


def _sizes(
    qkv: torch.Tensor, cos_sin: torch.Tensor | None, k_cache: torch.Tensor, norm: QueryKeyNorm | None
) -> dict[str, int]:
    """The kernel's constants, and its warps."""
    block_size, kv_heads = k_cache.shape[1:3]
    head_dim = cached_head_dim(k_cache)
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    half = 0 if cos_sin is None else cos_sin.shape[1] // 2
    query_norm = 0 if norm is None else _norm_kind(norm.query, heads, head_dim)
    key_norm = 0 if norm is None else _norm_kind(norm.key, kv_heads, head_dim)
    head_block = power_of_two(head_dim)
    few = max(1, _TILE // head_block)
    query_tile, kv_tile = (
        power_of_two(count) if kind == _HEADS_TOGETHER else min(few, power_of_two(count))
        for count, kind in ((heads, query_norm), (kv_heads, key_norm))
    )
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "BLOCK_SIZE": block_size,
        "QUERY_NORM": query_norm,
        "KEY_NORM": key_norm,
        "QUERY_TILE": query_tile,
        "KV_TILE": kv_tile,
        "HALF_BLOCK": power_of_two(max(1, half)),
        "REST_BLOCK": power_of_two(max(1, head_dim - 2 * half)),
        "HEAD_BLOCK": head_block,
        "num_warps": min(_MOST_WARPS, max(1, max(query_tile, kv_tile) * head_block // (32 * _PER_THREAD))),
    }


def _norm_kind(weight: torch.Tensor, heads: int, head_dim: int) -> int:
    if len(weight) == head_dim:
        return _HEADS_ALONE
    if len(weight) == heads * head_dim:
        return _HEADS_TOGETHER
    raise ValueError(f"a norm of {len(weight)} values is neither one of {head_dim} nor of {heads} heads of them")
