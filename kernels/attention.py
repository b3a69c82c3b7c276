"""Attention over paged keys and values: prefill, chunks of it and decode, all in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .exact import exp
from .kv_layout import decode
from .linear import padded_rows
from .lists import ints

TILE = 32  # keys taken together, always from position 0 on; the compiled kernel has the same
QUERIES = 64  # queries taken together, so that memory stays bounded
# Batched products keep a row's bits for multiples of four rows, as `linear` does, and only for multiples of four
# columns.
ROW_MULTIPLE, WIDTH_MULTIPLE = 4, 16


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Which sequences of a step run on the same blocks, from the first on, so that these are read once for all of them.

    Only for backends that can; results are the same bits without. A tile is some sequences that share their first
    positions, tile_len of them, a multiple of the backend's split.
    """

    seqs: torch.Tensor  # int32 [tiles, most in a tile]: numbers of sequences with one row each, then -1
    tile_len: torch.Tensor  # int32 [tiles]: 0 for a tile that is not in use
    own_from: torch.Tensor  # int32 [sequences]: the first position that no tile of the sequence's covers


@dataclass(frozen=True, slots=True)
class Paging:
    """Where the rows and the blocks of each sequence of a step are."""

    block_table: torch.Tensor  # int32 [sequences, max_blocks]: the block of each block_size positions
    query_start: torch.Tensor  # int32 [sequences + 1]: sequence s has rows [query_start[s], query_start[s + 1])
    kv_len: torch.Tensor  # int32 [sequences]: keys of each sequence, those of its own rows included
    max_queries: int = 0  # at least as many as any sequence has rows; 0: not known
    shared: SharedPrefix | None = None


def paged_attention(  # noqa: PLR0913, PLR0917  all of it differs from call to call
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    paging: Paging,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's last queries over all its keys: softmax(cap(scale · q·k)) · v.

    query     [rows, heads, head_dim]; rows from query_start[-1] on are padding. Row i of a sequence's n stands at
              position kv_len - n + i and sees positions [max(0, position - window + 1), position]
    k_cache, v_cache  [num_blocks, block_size, kv_heads, width] in one of the types of `kv_layout`, heads a multiple of
              kv_heads. This function takes the layout by_position
    window    0 sees everything before; otherwise the number of positions seen, the query's own included
    soft_cap  0 is off; otherwise scores become soft_cap · tanh(score / soft_cap)
    sinks     float32 [heads]: a score more in each head's softmax, of a key whose value is 0; None is none
    kv_scales  float32 [2, kv_heads], of keys and of values: what float8 caches come with, and no others

    Result: [rows, heads, head_dim] of query's dtype, zero in padding rows. Arithmetic is float32. Slots that no query
    of a sequence sees are never read, whatever is in them. A query's result depends on its own sequence alone, to the
    last bit: keys are taken in tiles at fixed positions, tiles are merged in order, and the sink comes last.
    Sources: of the merge https://arxiv.org/abs/1805.02867, of sinks https://arxiv.org/abs/2309.17453
    """
    out = torch.zeros_like(query)
    starts, lengths = ints(paging.query_start), ints(paging.kv_len)
    caches = (
        [(k_cache, None), (v_cache, None)]
        if kv_scales is None
        else list(zip((k_cache, v_cache), kv_scales, strict=True))
    )
    for s, length in enumerate(lengths):
        begin, end = starts[s], starts[s + 1]
        for first in range(begin, end, QUERIES):
            last = min(first + QUERIES, end)
            position = length - end + first  # of the first query in this group
            rows = query[first:last].float()
            out[first:last] = _attend(rows, caches, paging.block_table[s], position, scale, window, soft_cap, sinks).to(
                query.dtype
            )
    return out


def _attend(
    query: torch.Tensor,
    caches: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    blocks: torch.Tensor,
    position: int,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of some neighbouring queries of one sequence: query float32 [count, heads, head_dim]."""
    count, heads, head_dim = query.shape
    kv_heads = caches[0][0].shape[2]
    per_kv = heads // kv_heads
    rows, width = padded_rows(count * per_kv, ROW_MULTIPLE), padded_rows(head_dim, WIDTH_MULTIPLE)
    q = query.new_zeros(kv_heads, rows, width)
    by_kv_head = query.view(count, kv_heads, per_kv, head_dim).transpose(0, 1)
    q[:, : count * per_kv, :head_dim] = by_kv_head.reshape(kv_heads, -1, head_dim)
    at = position + torch.arange(rows, device=query.device) // per_kv  # position of each row; beyond the last: padding
    first_seen = (at - window + 1 if window else torch.zeros_like(at)).clamp(min=0)
    low, high = int(first_seen[0]), position + count
    top = query.new_full((kv_heads, rows, 1), float("-inf"))
    weight_sum = query.new_zeros(kv_heads, rows, 1)
    total = torch.zeros_like(q)
    for start in range(low // TILE * TILE, high, TILE):
        keys, values = (_tile(cache, blocks, start, low, high, width) for cache in caches)
        score = torch.bmm(q, keys.transpose(1, 2)) * scale
        if soft_cap:
            score = soft_cap * (1.0 - 2.0 / (exp(score * (2.0 / soft_cap)) + 1.0))
        key = torch.arange(start, start + TILE, device=query.device)
        seen = (key <= at[:, None]) & (key >= first_seen[:, None]) & (key < high)
        score = score.masked_fill(~seen, float("-inf"))
        new_top = torch.maximum(top, score.amax(-1, keepdim=True))
        base = new_top.masked_fill(new_top == float("-inf"), 0.0)  # a row that has seen no key yet
        weight, old = exp(score - base), exp(top - base)
        weight_sum = weight_sum * old + weight.sum(-1, keepdim=True)
        total = total * old + torch.bmm(weight, values)
        top = new_top
    if sinks is not None:
        of_row = query.new_zeros(kv_heads, rows, 1)
        of_row[:, : count * per_kv, 0] = sinks.view(kv_heads, per_kv).repeat(1, count)
        weight_sum = weight_sum + exp(of_row - top)
    out = (total / weight_sum.clamp(min=1e-30))[:, : count * per_kv, :head_dim]
    return out.reshape(kv_heads, count, per_kv, head_dim).transpose(0, 1).reshape(count, heads, head_dim)


def _tile(
    cached: tuple[torch.Tensor, torch.Tensor | None], blocks: torch.Tensor, start: int, low: int, high: int, width: int
) -> torch.Tensor:
    """Float32 [kv_heads, TILE, width] of positions from `start` on; zero outside [low, high) and beyond head_dim."""
    cache, scales = cached
    block_size, kv_heads = cache.shape[1:3]
    first, last = max(start, low), min(start + TILE, high)
    position = torch.arange(first, last, device=cache.device)
    tile = torch.zeros((TILE, kv_heads, width), device=cache.device)
    vectors = decode(cache[blocks[position // block_size].long(), position % block_size], scales)
    tile[first - start : last - start, :, : vectors.shape[-1]] = vectors
    return tile.transpose(0, 1).contiguous()
