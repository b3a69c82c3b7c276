"""Merges the parts of split keys into the attention over all of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention import Paging
from .shapes import LOG2_E, Attention, Scratch, power_of_two
from .split_keys import LOWEST, decode_rows

MOST_VALUES = 2048  # of parts, held at a time
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit(do_not_specialize_on_alignment=["query_start", "kv_len", "sinks"])
def _merge(
    parts,
    lse,
    query_start,
    kv_len,
    sinks,
    out,
    OUT_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """grid: (sequences, heads).

    parts float32 [sequences, heads, SPLITS, HEAD_DIM] and lse float32 [sequences, heads, SPLITS], of which only what
    is live is written and read; MOST: a power of two, at least as many as are live; query_start, kv_len int32;
    sinks float32 [heads] or None; out [rows, heads, HEAD_DIM], rows OUT_ROW apart.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row, _, _, from_split, to_split = decode_rows(query_start, kv_len, seq, seq >= 0, WINDOW, SPLIT)
    if to_split - from_split <= 1:  # none, or its program has written the result
        return
    slot = (seq.to(tl.int64) * tl.num_programs(1) + head) * SPLITS
    any_split = from_split + tl.arange(0, MOST)
    all_lse = tl.load(lse + slot + any_split, mask=any_split < to_split, other=float("-inf"))
    top = tl.maximum(tl.max(all_lse, 0), LOWEST)
    total = tl.sum(tl.exp2(all_lse - top), 0)
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head) * _LOG2_E - top)  # a score more, of a value of 0
    dim = tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH], tl.float32)
    for start in range(from_split, to_split, CHUNK):
        split = start + tl.arange(0, CHUNK)
        is_live = split < to_split
        weight = tl.exp2(tl.load(lse + slot + split, mask=is_live, other=float("-inf")) - top)
        at = (slot + split)[:, None] * HEAD_DIM + dim[None, :]
        part = tl.load(parts + at, mask=is_live[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
    result = acc / tl.where(total == 0, 1.0, total)
    at = row * OUT_ROW + head * HEAD_DIM + dim
    tl.store(out + at, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def merge_splits(paging: Paging, out: torch.Tensor, how: Attention, scratch: Scratch, most: int) -> None:
    """Write the rows of `out` whose sequences have one query and keys in more than one split, of `most` at the most."""
    heads, head_dim = out.shape[1:]
    width = max(16, power_of_two(head_dim))
    _merge[(paging.kv_len.shape[0], heads)](
        scratch.parts, scratch.lse, paging.query_start, paging.kv_len, how.sinks, out,
        OUT_ROW=out.stride(0), HEAD_DIM=head_dim, WIDTH=width, SPLIT=scratch.split, SPLITS=scratch.num_splits,
        MOST=power_of_two(most), CHUNK=min(power_of_two(most), MOST_VALUES // width), WINDOW=how.window, num_warps=4,
    )  # fmt: skip
