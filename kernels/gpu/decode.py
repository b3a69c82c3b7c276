"""Attention over paged keys and values of the sequences of a step that have one query each.

A sequence's keys are split at fixed positions, and each split is a program's; parts are merged where there are some.
Reference: `attention.paged_attention`. Sources: https://arxiv.org/abs/2311.01282 (splits),
https://arxiv.org/abs/1805.02867 (the merge), https://arxiv.org/abs/2309.17453 (sinks).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention import Paging
from ..kv_layout import float8_scales
from .merge import merge_splits
from .shapes import LOG2_E, Attention, Scratch, power_of_two
from .shared_prefix import shared_prefix_parts
from .split_keys import (
    attend,
    decode_rows,
    keys_per_tile,
    launch_options,
    most_rows,
    product_type,
    score_scale,
)

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table", "query_start", "kv_len", "own_from", "kv_scales", "sinks"],
)
def _decode(
    query,
    k_cache,
    v_cache,
    table,
    query_start,
    kv_len,
    own_from,
    kv_scales,
    sinks,
    out,
    parts,
    lse,
    scale,
    table_stride,
    QUERY_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRODUCT: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """grid: (sequences, KV heads · tiles of ROWS of their GROUP query heads, most splits that a sequence has live).

    query [rows, KV_HEADS · GROUP, HEAD_DIM], rows QUERY_ROW apart, out as well; k_cache, v_cache by_head_rows;
    table int32, rows table_stride apart; query_start, kv_len, own_from int32; kv_scales float32 [2, KV_HEADS];
    sinks float32 [heads]; parts float32 [sequences, heads, SPLITS, HEAD_DIM]; lse float32 [sequences, heads, SPLITS].
    own_from, kv_scales and sinks may be None.
    """
    seq = tl.program_id(0)
    kv_head = tl.program_id(1) % KV_HEADS
    row, length, first, from_split, to_split = decode_rows(query_start, kv_len, seq, seq >= 0, WINDOW, SPLIT)
    split = from_split + tl.program_id(2)
    if own_from is not None:
        split += tl.load(own_from + seq) // SPLIT  # what comes before is in parts already
    if split >= to_split:
        return
    in_group = tl.program_id(1) // KV_HEADS * ROWS + tl.arange(0, ROWS)
    head = kv_head * GROUP + in_group
    dim = tl.arange(0, WIDTH)
    is_head = in_group < GROUP
    is_value = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    in_row = head[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(query + row * QUERY_ROW + in_row, mask=is_value, other=0.0).to(PRODUCT)
    if kv_scales is not None:
        scale *= tl.load(kv_scales + kv_head)
    acc, top, total = attend(
        q, k_cache, v_cache, table + seq.to(tl.int64) * table_stride, kv_head, split * SPLIT,
        tl.minimum(split * SPLIT + SPLIT, length), first, scale, KV_HEADS, BLOCK_SIZE, HEAD_DIM, SOFT_CAP, TILE,
        WINDOW,
    )  # fmt: skip
    is_only = to_split - from_split == 1
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_head, other=float("-inf"))
        total += tl.where(is_only, tl.exp2(sink * _LOG2_E - top), 0.0)  # with other parts it joins in the merge
    factor = 1.0 / tl.where(total == 0, 1.0, total)
    if kv_scales is not None:
        factor *= tl.load(kv_scales + KV_HEADS + kv_head)
    result = acc * factor[:, None]
    if is_only:
        tl.store(out + row * OUT_ROW + in_row, result.to(out.dtype.element_ty), mask=is_value)
    else:
        slot = (seq.to(tl.int64) * (KV_HEADS * GROUP) + head) * SPLITS + split
        tl.store(parts + slot[:, None] * HEAD_DIM + dim[None, :], result, mask=is_value)
        tl.store(lse + slot, top + tl.log2(total), mask=is_head)


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    paging: Paging,
    out: torch.Tensor,
    how: Attention,
    scratch: Scratch,
) -> None:
    """Attention of the sequences that have exactly one query; `out` is written in their rows and nowhere else.

    query     [rows, heads, head_dim], float32, bfloat16 or float16; a row's values lie together, rows may be apart
    k_cache, v_cache  [blocks, block_size, kv_heads, width], contiguous, by_head_rows, in any of the types of
              `kv_layout`, block_size a power of two
    paging    its `shared` saves reads in layers without a window; there own_from must be below kv_len
    out       as query
    scratch   for at least as many sequences, and for the longest of them; what it holds is of use to nobody after

    Products are taken in query's type where the cache's values fit into it and in float32 elsewhere; all else is
    float32. A sequence's bits depend on nothing but itself. Nothing is read that it does not see. Only shapes decide
    what is launched, so a CUDA graph may hold it. A new binary is made for other shapes of a model, other layers'
    windows, and where the address of query, caches, out or scratch stops being a multiple of 16 bytes.
    Raises ValueError for a float8 cache without kv_scales, and where scratch's split does not fit.
    """
    heads, head_dim = query.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    tile = keys_per_tile(head_dim)
    if scratch.split % tile:
        raise ValueError(f"a split of {scratch.split} positions is no multiple of {tile}")
    kv_scales = float8_scales(k_cache.dtype, how.kv_scales)
    shared = None if how.window or scratch.num_splits == 1 else paging.shared
    if shared is not None:
        shared_prefix_parts(query, k_cache, v_cache, paging, how, scratch)
    sequences, group = paging.kv_len.shape[0], heads // kv_heads
    rows = min(most_rows(head_dim), max(16, power_of_two(group)))
    most = live_splits(how.window, scratch)
    if not sequences:
        return
    _decode[(sequences, kv_heads * -(-group // rows), most)](
        query, k_cache, v_cache, paging.block_table, paging.query_start, paging.kv_len,
        None if shared is None else shared.own_from, kv_scales, how.sinks, out, scratch.parts, scratch.lse,
        score_scale(how), paging.block_table.stride(0),
        QUERY_ROW=query.stride(0), OUT_ROW=out.stride(0), KV_HEADS=kv_heads, GROUP=group, ROWS=rows,
        HEAD_DIM=head_dim, WIDTH=max(16, power_of_two(head_dim)), BLOCK_SIZE=block_size,
        PRODUCT=product_type(query.dtype, k_cache.dtype), TILE=tile, SPLIT=scratch.split, SPLITS=scratch.num_splits,
        WINDOW=how.window, SOFT_CAP=how.soft_cap * LOG2_E, **launch_options(head_dim, rows, k_cache.dtype),
    )  # fmt: skip
    if most > 1:
        merge_splits(paging, out, how, scratch, most)


def live_splits(window: int, scratch: Scratch) -> int:
    """The most splits in which one query sees keys: `window` neighbours lie in no more."""
    if not window:
        return scratch.num_splits
    return min(scratch.num_splits, (window + scratch.split - 2) // scratch.split + 1)
