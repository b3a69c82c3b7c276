"""The first splits of sequences that run on the same blocks: their keys and values are read once for all of them.

Parts go where `decode` would have written them, computed by the same steps at the same positions, so the merge does not
know the difference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention import Paging
from ..kv_layout import float8_scales
from .shapes import LOG2_E, Attention, Scratch, power_of_two
from .split_keys import (
    attend,
    decode_rows,
    keys_per_tile,
    launch_options,
    most_rows,
    product_type,
    score_scale,
)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table", "query_start", "kv_len", "seqs", "tile_len", "kv_scales"],
)
def _shared_prefix(
    query,
    k_cache,
    v_cache,
    table,
    query_start,
    kv_len,
    seqs,
    tile_len,
    kv_scales,
    parts,
    lse,
    scale,
    table_stride,
    PER_TILE: tl.constexpr,
    QUERY_ROW: tl.constexpr,
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
    SOFT_CAP: tl.constexpr,
):
    """grid: (tiles, KV heads · ROWS of PER_TILE · GROUP queries, splits).

    seqs int32 [tiles, PER_TILE], tile_len int32 [tiles]; all others as `decode._decode` has them.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    if split * SPLIT >= tl.load(tile_len + tile):
        return
    number = tl.program_id(1) // KV_HEADS * ROWS + tl.arange(0, ROWS)  # of a query: sequence by sequence
    seq = tl.load(seqs + tile * PER_TILE + number // GROUP, mask=number < PER_TILE * GROUP, other=-1)
    row, _, _, _, to_split = decode_rows(query_start, kv_len, seq, seq >= 0, 0, SPLIT)
    is_live = split < to_split
    head = kv_head * GROUP + number % GROUP
    dim = tl.arange(0, WIDTH)
    is_value = is_live[:, None] & (dim < HEAD_DIM)[None, :]
    at = row * QUERY_ROW + head * HEAD_DIM
    q = tl.load(query + at[:, None] + dim[None, :], mask=is_value, other=0.0).to(PRODUCT)
    if kv_scales is not None:
        scale *= tl.load(kv_scales + kv_head)
    source = tl.load(seqs + tile * PER_TILE).to(tl.int64)
    acc, top, total = attend(
        q, k_cache, v_cache, table + source * table_stride, kv_head, split * SPLIT, split * SPLIT + SPLIT, 0, scale,
        KV_HEADS, BLOCK_SIZE, HEAD_DIM, SOFT_CAP, TILE, 0,
    )  # fmt: skip
    factor = 1.0 / tl.where(total == 0, 1.0, total)
    if kv_scales is not None:
        factor *= tl.load(kv_scales + KV_HEADS + kv_head)
    slot = (seq.to(tl.int64) * (KV_HEADS * GROUP) + head) * SPLITS + split
    tl.store(parts + slot[:, None] * HEAD_DIM + dim[None, :], acc * factor[:, None], mask=is_value)
    tl.store(lse + slot, top + tl.log2(total), mask=is_live)


def shared_prefix_parts(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    paging: Paging,
    how: Attention,
    scratch: Scratch,
) -> None:
    """Write into `scratch` the parts of the splits that paging.shared has, for a layer without a window.

    The blocks are those of a tile's first sequence, which must be in use. Which tiles there are, and how many splits
    they have, is read on the device. Arguments are as for `decode.decode_attention`.
    """
    shared = paging.shared
    if shared is None or not shared.tile_len.shape[0]:
        return
    heads, head_dim = query.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    per_tile, group = shared.seqs.shape[1], heads // kv_heads
    rows = min(most_rows(head_dim), max(16, power_of_two(per_tile * group)))
    grid = (shared.tile_len.shape[0], kv_heads * -(-per_tile * group // rows), scratch.num_splits)
    _shared_prefix[grid](
        query, k_cache, v_cache, paging.block_table, paging.query_start, paging.kv_len, shared.seqs, shared.tile_len,
        float8_scales(k_cache.dtype, how.kv_scales), scratch.parts, scratch.lse, score_scale(how),
        paging.block_table.stride(0),
        PER_TILE=per_tile, QUERY_ROW=query.stride(0), KV_HEADS=kv_heads, GROUP=group, ROWS=rows, HEAD_DIM=head_dim,
        WIDTH=max(16, power_of_two(head_dim)), BLOCK_SIZE=block_size,
        PRODUCT=product_type(query.dtype, k_cache.dtype), TILE=keys_per_tile(head_dim),
        SPLIT=scratch.split, SPLITS=scratch.num_splits, SOFT_CAP=how.soft_cap * LOG2_E,
        **launch_options(head_dim, rows, k_cache.dtype),
    )  # fmt: skip
