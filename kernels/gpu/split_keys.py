"""What decode kernels have in common: which splits of its keys a sequence has, and how queries attend to one.

Keys are split at multiples of SPLIT positions from position 0 on and taken TILE at a time, so what is computed depends
on the sequence alone. All that read keys do it by `attend`, and which splits are live all learn from `decode_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .shapes import LOG2_E, Attention

LOWEST = tl.constexpr(-3e38)  # what a largest score begins with: finite, so that two of them have a difference


def keys_per_tile(head_dim: int) -> int:
    """How many keys a step takes; the same for all kernels, whose bits then are the same."""
    return 64 if head_dim <= 64 else 32


def most_rows(head_dim: int) -> int:
    """How many queries a program may take: for more, sums do not fit in registers."""
    return 64 if head_dim <= 128 else 32


def launch_options(head_dim: int, rows: int, cached: torch.dtype) -> dict[str, int]:
    """Warps, stages for keys in two buffers, and registers of a thread where ptxas would spill before it takes them."""
    narrow, many = cached.itemsize == 1, rows > 32 or (head_dim > 128 and (rows < 32 or cached.itemsize > 1))
    most = {"maxnreg": 255 if many else 168} if narrow and (rows > 32 or head_dim & (head_dim - 1)) else {}
    return {"num_warps": 8 if many else 4, "num_stages": 3, **most}


def product_type(query: torch.dtype, cached: torch.dtype) -> tl.dtype:
    """The type of operands of products: query's where it holds all values of the cache, else float32."""
    if cached != query and cached.itemsize > 1:
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[query]


def score_scale(how: Attention) -> float:
    """What a product of a query and a key is multiplied by: scores are exponents of 2, or twice a tanh's argument."""
    return how.scale * LOG2_E * (2.0 / how.soft_cap if how.soft_cap else 1.0)


@triton.jit
def decode_rows(query_start, kv_len, seq, known, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """For sequences of one query: its row, how many keys there are, the first it sees, and its splits [from, to).

    seq: a number or numbers of sequences, known: which of them are any. Where it has other than one query, or no keys,
    there are no splits: from is not below to.
    """
    row = tl.load(query_start + seq, mask=known, other=0)
    queries = tl.load(query_start + seq + 1, mask=known, other=0) - row
    length = tl.where(queries == 1, tl.load(kv_len + seq, mask=known, other=0), 0)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
    return row.to(tl.int64), length, first, first // SPLIT, tl.cdiv(length, SPLIT)


@triton.jit
def attend(
    q,
    k_cache,
    v_cache,
    table,
    kv_head,
    begin,
    end,
    first,
    scale,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Rows of queries over the keys [max(begin, first), end) of one sequence and head; begin is a multiple of TILE.

    q         [rows, width] in the type of the products, zero from HEAD_DIM on
    k_cache, v_cache  by_head_rows; table: the sequence's row of the block table
    SOFT_CAP  in exponents of 2; 0 is off, as WINDOW is, without which first means nothing

    Returns float32 [rows, width]: sum of 2^(score - top) · value, [rows]: top, [rows]: sum of 2^(score - top).
    At least one key must be there.
    """
    ROWS: tl.constexpr = q.shape[0]
    WIDTH: tl.constexpr = q.shape[1]
    IS_INT8: tl.constexpr = k_cache.dtype.element_ty == tl.int8
    VECTORS: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM  # values of a block
    STRIDE: tl.constexpr = VECTORS + (4 * KV_HEADS * BLOCK_SIZE if IS_INT8 else 0)
    dim = tl.arange(0, WIDTH)
    step = tl.arange(0, TILE)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    if WINDOW > 0:
        begin = tl.maximum(begin, first // TILE * TILE)
    key = begin + step
    seen = key < end
    if WINDOW > 0:
        seen &= key >= first
    # Blocks are loaded one step ahead: only then can the loads of keys and values that wait for them be, too.
    blocks = tl.load(table + key // BLOCK_SIZE, mask=seen, other=0)
    for start in range(begin, end, TILE):
        key = start + step
        seen = key < end
        if WINDOW > 0:
            seen &= key >= first
        block = blocks.to(tl.int64)  # blocks lie further apart than 32 bits can say
        following = key + TILE
        blocks = tl.load(table + following // BLOCK_SIZE, mask=following < end, other=0)
        in_block = kv_head * BLOCK_SIZE + key % BLOCK_SIZE
        at = block * STRIDE + in_block * HEAD_DIM
        # Values behind a mask are read as 0, for a freed block may hold NaN, which no weight of 0 takes away.
        k = tl.load(k_cache + at[None, :] + dim[:, None], mask=(dim < HEAD_DIM)[:, None] & seen[None, :], other=0.0)
        v = tl.load(v_cache + at[:, None] + dim[None, :], mask=(dim < HEAD_DIM)[None, :] & seen[:, None], other=0.0)
        score = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if IS_INT8:
            # in units of a float32: a block's scales come after its vectors
            at_scale = block * (STRIDE // 4) + VECTORS // 4 + in_block
            k_scale = tl.load(k_cache.to(tl.pointer_type(tl.float32)) + at_scale, mask=seen, other=0.0)
            v_scale = tl.load(v_cache.to(tl.pointer_type(tl.float32)) + at_scale, mask=seen, other=0.0)
            score *= k_scale[None, :]
        if SOFT_CAP > 0:
            score = SOFT_CAP - 2.0 * SOFT_CAP / (tl.exp2(score) + 1.0)  # SOFT_CAP · tanh(score / 2), no overflow
        score = tl.where(seen[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weight, 1)
        acc *= rescale[:, None]
        if IS_INT8 and q.dtype == tl.float16:
            # a scale is too small for float16: the tile's largest is taken out of the product
            most = tl.max(v_scale, 0)
            weight *= (v_scale / tl.where(most > 0, most, 1.0))[None, :]
            acc += tl.dot(weight.to(q.dtype), v.to(q.dtype)) * most
        else:
            if IS_INT8:
                weight *= v_scale[None, :]
            acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        top = new_top
    return acc, top, total
