"""Attention of prompts, chunks of them and drafts over paged keys and values: sequences with two query rows or more.

The caches are laid out by_head_rows (see `kv_layout`). What a query sees, and every option, is as in
`attention.paged_attention`. Method: https://arxiv.org/abs/2307.08691, over blocks as in https://arxiv.org/abs/2309.06180.

The rows of a tile are pairs of a query and one of the query heads that share a KV head, in the order
(query, head): a tile is full whatever number of heads that is, and a query's heads may be in two tiles.

What a result's bits depend on: keys are taken in tiles that begin at multiples of the tile from position 0 on, a tile
that a row does not see changes nothing in it, and with and without a mask the same operations follow. So neighbours in
the batch never change a bit of a result, nor does it matter which rows a sequence was cut into, as long as the compiled
product of matrices gives a row the same bits in each of the kernel's loops; that, a compiler does not promise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..attention import Paging
from ..kv_layout import float8_scales
from .shapes import LOG2_E, Attention, power_of_two

_LOG2_E = tl.constexpr(LOG2_E)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How much a program takes at once."""

    rows: int  # pairs of a query and a head
    keys: int
    warps: int
    stages: int


def tiles(head_dim: int, product: torch.dtype, cached: torch.dtype, capability: int) -> Tiles:
    """Choose by what a model and a device have, so that there is one kernel whatever the batch is.

    Chosen so that nothing is spilled: with 64 rows, sums of 128 dimensions take 64 registers of each of 128 threads.
    Before sm_90 operands of products are registers too, and a tile of narrow keys is converted in them everywhere.
    """
    wide, narrow_cache = head_dim > 128, cached.itemsize < product.itemsize
    if product == torch.float32:
        return Tiles(32, 16 if wide else 32, 4, 2)
    if capability < 90:
        return Tiles(64, 16 if wide and narrow_cache else 32, 8 if wide or narrow_cache else 4, 3)
    if wide:
        return Tiles(128, 16 if narrow_cache else 32, 8, 3)
    return Tiles(64 if cached == torch.int8 else 128, 64, 8, 3) if capability >= 100 else Tiles(64, 64, 4, 3)


def prefill_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    paging: Paging,
    out: torch.Tensor,
    how: Attention,
    capability: int = 90,
) -> None:
    """Write `out` in the rows of sequences that have two rows or more, and in no others.

    query, out        [rows, heads, head_dim] of float32, bfloat16 or float16; rows may lie any number of heads apart
    k_cache, v_cache  [num_blocks, block_size, kv_heads, width], by_head_rows; block_size is a power of two from 4 up
    capability        of the device, 90 for sm_90: which binary runs depends on it

    Products of matrices are of the query's type, or float32 where that does not hold all values of the cache; sums are
    float32. Nothing here waits for the device. Which binary runs depends on types, sizes of the model and options that
    are on or off, not on lengths or numbers of rows. how.scale is above 0.
    Raises ValueError where a float8 cache comes without kv_scales.
    """
    rows, heads, head_dim = query.shape
    block_size, kv_heads = k_cache.shape[1:3]
    cached, num_seqs, table_stride = k_cache.dtype, paging.block_table.shape[0], paging.block_table.stride(0)
    kv_scales = float8_scales(cached, how.kv_scales)
    if paging.max_queries == 1 or rows < 2 or num_seqs == 0:
        return
    product = query.dtype if cached.itemsize == 1 or cached == query.dtype else torch.float32
    tile = tiles(head_dim, product, cached, capability)
    group = heads // kv_heads
    factor, inner = how.scale * LOG2_E, 0.0
    if how.soft_cap:
        factor, inner = how.soft_cap * LOG2_E, 2.0 * factor / how.soft_cap
    _prefill[rows * group // tile.rows + num_seqs, kv_heads](
        query, k_cache, v_cache, out, paging.block_table, paging.query_start, paging.kv_len, how.sinks, kv_scales,
        factor, inner, how.window, num_seqs, table_stride, query.stride(0) // head_dim, out.stride(0) // head_dim,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, WIDTH=max(16, power_of_two(head_dim)), BLOCK_SIZE=block_size,
        ROWS=tile.rows, KEYS=tile.keys, WIDE_PRODUCT=product == torch.float32, CAPPED=how.soft_cap > 0,
        WINDOWED=how.window > 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _sequence_of(tile, query_start, num_seqs, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The sequence that a tile belongs to: the tiles of sequence s begin at query_start[s] · GROUP // ROWS + s."""
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start + middle) * GROUP // ROWS + middle <= tile
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
    return low


@triton.jit
def _block_ids(table, key, low, high, BLOCK_SIZE: tl.constexpr):
    """The blocks of keys [KEYS], as int32; 0 for what lies outside of [low, high), where a table holds anything."""
    return tl.load(table + key // BLOCK_SIZE, mask=(key >= low) & (key < high), other=0)


@triton.jit
def _attend(begin, end, top, weight_sum, total, block, q, k_cache, v_cache, table, low, high, position, window,
            factor, inner, kv_head, MASKED: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr):  # fmt: skip
    """Take the tiles of keys in [begin, end) into top, weight_sum [ROWS] and total [ROWS, width].

    MASKED  whether some row does not see some key of them; else all are in [low, high), which is what some row sees
    block   has the block ids of the tile at `begin`, and when done of that at `end`: a load of keys whose address waits
            for another load of the same turn cannot be started a turn earlier
    """
    WIDTH: tl.constexpr = q.shape[1]
    IS_INT8: tl.constexpr = k_cache.dtype.element_ty == tl.int8
    VECTORS: tl.constexpr = BLOCK_SIZE * KV_HEADS * HEAD_DIM  # values of a block; scales, 4 bytes each, lie behind
    STRIDE: tl.constexpr = VECTORS + (BLOCK_SIZE * KV_HEADS * 4 if IS_INT8 else 0)
    dim = tl.arange(0, WIDTH)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        wide_block = block.to(tl.int64)  # blocks lie further apart than 32 bits can say
        slot = kv_head * BLOCK_SIZE + key % BLOCK_SIZE
        at = (wide_block * STRIDE + slot * HEAD_DIM)[:, None] + dim[None, :]
        block = _block_ids(table, key + KEYS, low, high, BLOCK_SIZE)
        # What is masked is read as 0: a freed block may hold NaN, which no weight of 0 takes away.
        inside = (key >= low) & (key < high)
        if MASKED:
            k = tl.load(k_cache + at, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_cache + at, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        elif WIDTH > HEAD_DIM:
            k = tl.load(k_cache + at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_cache + at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            k, v = tl.load(k_cache + at), tl.load(v_cache + at)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if IS_INT8:
            at_scale = wide_block * (STRIDE // 4) + VECTORS // 4 + slot  # in units of a float32
            k_scale = tl.load(k_cache.to(tl.pointer_type(tl.float32), bitcast=True) + at_scale, mask=inside, other=0.0)
            v_scale = tl.load(v_cache.to(tl.pointer_type(tl.float32), bitcast=True) + at_scale, mask=inside, other=0.0)
            score *= k_scale[None, :]
        if CAPPED:
            score = 1.0 - 2.0 / (tl.exp2(score * inner) + 1.0)
        if MASKED:  # before the last factor, so that what follows is compiled to the same operations in either case
            seen = key[None, :] <= position[:, None]
            if WINDOWED:
                seen &= key[None, :] > position[:, None] - window
            score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * factor)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
        weight = tl.exp2(tl.fma(score, factor, -base[:, None]))
        old = tl.exp2(top - base)
        weight_sum = weight_sum * old + tl.sum(weight, 1)
        total *= old[:, None]
        if IS_INT8 and q.dtype == tl.float16:  # scales are too small for it: a power of two stays out of the product
            most = tl.max(v_scale, 0)
            most = tl.exp2(tl.ceil(tl.log2(tl.where(most > 0.0, most, 1.0))))
            total += tl.dot((weight * (v_scale / most)[None, :]).to(q.dtype), v.to(q.dtype)) * most
        else:
            if IS_INT8:
                weight *= v_scale[None, :]
            total = tl.dot(weight.to(q.dtype), v.to(q.dtype), total, input_precision="ieee")
        top = new_top
    return top, weight_sum, total, block


# Strides count vectors of head_dim, so that their multiples of 16 are known; nothing else of a launch is specialised.
_VARYING = ["block_table", "query_start", "kv_len", "sinks", "kv_scales", "window", "num_seqs", "table_stride",
            "query_pitch", "out_pitch"]  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def _prefill(query, k_cache, v_cache, out, block_table, query_start, kv_len, sinks, kv_scales, factor, inner, window,
             num_seqs, table_stride, query_pitch, out_pitch, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
             HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
             KEYS: tl.constexpr, WIDE_PRODUCT: tl.constexpr, CAPPED: tl.constexpr,
             WINDOWED: tl.constexpr):  # fmt: skip
    """Grid: (tiles of ROWS rows and at most one more a sequence, kv heads). Parameters as in `prefill_attention`.

    factor, inner  a score is factor · (q·k), or capped factor · tanh(inner · ln 2 / 2 · (q·k)); base 2 throughout
    query_pitch, out_pitch  vectors of HEAD_DIM from one row to the next
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last tiles see most keys: they begin first
    kv_head = tl.program_id(1)
    seq = _sequence_of(tile, query_start, num_seqs, GROUP, ROWS)
    begin_row = tl.load(query_start + seq)
    queries = tl.load(query_start + seq + 1) - begin_row
    length = tl.load(kv_len + seq)
    first_row = (tile - seq - begin_row * GROUP // ROWS) * ROWS
    if (queries < 2) | (first_row >= queries * GROUP) | (length == 0):
        return
    row = first_row + tl.arange(0, ROWS)
    real = row < queries * GROUP
    position = length - queries + row // GROUP
    first_position = length - queries + first_row // GROUP
    high = length - queries + tl.minimum((first_row + ROWS - 1) // GROUP, queries - 1) + 1
    low = 0
    seen_by_all = 0  # the first tile that is inside every row's window
    if WINDOWED:
        low = tl.maximum(first_position - window + 1, 0)
        seen_by_all = tl.minimum(tl.cdiv(tl.maximum(high - window, 0), KEYS) * KEYS, tl.cdiv(high, KEYS) * KEYS)
    #   low        seen_by_all           masked_from      high
    #    |  masked  |  seen by all rows   |  masked        |        all but low and high at multiples of KEYS
    masked_from = tl.maximum((first_position + 1) // KEYS * KEYS, seen_by_all)

    dim = tl.arange(0, WIDTH)
    vector = (begin_row + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    store = real[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + ((vector * query_pitch + head) * HEAD_DIM)[:, None] + dim[None, :], mask=store, other=0.0)
    if WIDE_PRODUCT:
        q = q.to(tl.float32)
    if kv_scales is not None:
        k_scale = tl.load(kv_scales + kv_head)
        if CAPPED:
            inner = inner * k_scale
        else:
            factor = factor * k_scale

    table = block_table + seq.to(tl.int64) * table_stride
    start = low // KEYS * KEYS
    block = _block_ids(table, start + tl.arange(0, KEYS), low, high, BLOCK_SIZE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    if WINDOWED:
        top, weight_sum, total, block = _attend(
            start, seen_by_all, top, weight_sum, total, block, q, k_cache, v_cache, table, low, high, position, window,
            factor, inner, kv_head, True, KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, CAPPED, WINDOWED)  # fmt: skip
    top, weight_sum, total, block = _attend(
        seen_by_all, masked_from, top, weight_sum, total, block, q, k_cache, v_cache, table, low, high, position,
        window, factor, inner, kv_head, False, KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, CAPPED,
        WINDOWED)  # fmt: skip
    top, weight_sum, total, block = _attend(
        masked_from, high, top, weight_sum, total, block, q, k_cache, v_cache, table, low, high, position, window,
        factor, inner, kv_head, True, KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, CAPPED, WINDOWED)  # fmt: skip

    if sinks is not None:
        weight_sum += tl.exp2(tl.load(sinks + head, mask=real, other=0.0) * _LOG2_E - top)
    result = total / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
    if kv_scales is not None:
        result = result * tl.load(kv_scales + KV_HEADS + kv_head)
    to = out + ((vector * out_pitch + head) * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=store)
