"""What top_k, top_p and min_p leave of a row: found by a search for the limit, without sorting.

A token's distance d ≥ 0 from the row's best, in units of the temperature, has float32 bits that are ordered as d is,
and equal exactly where the reference's scaled scores are. A row's result is (best, limit, last): tokens stay whose
bits are below the limit, and of those at the limit, whose ids are at most `last`.

The search narrows an interval of bits (low, high] by eight pivots a pass over the row, of which the first pass has the
powers of two from ½ to 32, until a single token is in it, or a single value. top_k counts and is exact. top_p adds up
weights exp(-d), in float32 within a tile and float64 across tiles: a token whose cumulative probability is within 2⁻¹⁷
of top_p may fall on either side (exp is off by 2⁻²² + 2⁻²³ · d, and d is below 20 where it counts; sums of a tile by
another 2⁻²²·⁵ or so). min_p compares d with a number that the host has made, and is exact.

Passes over a row, each from the L2 cache: 1 for the best; top_k 4 to 6 for scores of a language model, at most 11;
top_p as many; 1 more where equal scores are on both sides of the limit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .order import INFINITE, LOWEST, distance, is_finite, key_of, value_of
from .packing import NEVER, WORDS

TILE = 4096  # tokens; fixed, or sums would change
PIVOTS = tl.constexpr(8)
CUT_WORDS = 3  # int32 of a row: the best score's bits, the limit, the last id
UNCUT = tl.constexpr(NEVER)  # the limit of a row of which all stays


@triton.jit
def _distances(scores, token, top, temperature, VOCAB: tl.constexpr):
    """Distances of int32 tokens, and their bits; those of what is no token are above every pivot."""
    x = tl.load(scores + token, mask=token < VOCAB, other=float("-inf"))
    d = distance(top, x, temperature)
    return d, tl.where(token < VOCAB, d.to(tl.int32, bitcast=True), UNCUT)


@triton.jit
def _best_key(scores, VOCAB: tl.constexpr, TILE: tl.constexpr):
    best = tl.full([TILE], LOWEST, tl.int32)
    for begin in range(0, VOCAB, TILE):
        token = begin + tl.arange(0, TILE)
        best = tl.maximum(best, key_of(tl.load(scores + token, mask=token < VOCAB, other=float("-inf"))))
    return tl.max(best, 0)


@triton.jit
def _weigh(
    scores, pivots, top, temperature, BY_MASS: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """How many tokens are not beyond each pivot, int32 [PIVOTS], and their weight, float64 [PIVOTS] (or 0)."""
    count, mass = tl.zeros([PIVOTS], tl.int32), tl.zeros([PIVOTS], tl.float64)
    for begin in range(0, VOCAB, TILE):
        d, bits = _distances(scores, begin + tl.arange(0, TILE), top, temperature, VOCAB)
        inside = bits[None, :] <= pivots[:, None]
        count += tl.sum(inside.to(tl.int32), 1)
        if BY_MASS:
            mass += tl.sum(tl.where(inside, tl.exp(-d)[None, :], 0.0), 1).to(tl.float64)
    return count, mass


@triton.jit
def _search(
    scores, top, temperature, wanted, high, kept,
    BY_MASS: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The nearest limit within which `wanted` tokens are, or that part of the weight; not beyond `high`.

    `kept` tokens are to be kept up to high. Gives the limit, the tokens before it, the tokens up to it, and, of those
    at it, how many are to be kept.
    """
    index = tl.arange(0, PIVOTS)
    end = high
    pivots = tl.where(index < PIVOTS - 1, (126 + index) << 23, end - 1)  # ½, 1, 2 … 32, and all but the end
    count, mass = _weigh(scores, tl.minimum(pivots, end - 1), top, temperature, BY_MASS, VOCAB, TILE)
    target = tl.full([], 0.0, tl.float64)
    if BY_MASS:
        at_end = tl.exp(-end.to(tl.float32, bitcast=True)).to(tl.float64) * (kept - tl.max(count, 0)).to(tl.float64)
        target = wanted.to(tl.float64) * (tl.max(mass, 0) + at_end)
    low, before, below, within = high * 0 - 1, high * 0, target * 0, kept
    pivots = tl.minimum(pivots, end - 1)
    going = high == high
    while going:
        reached = ((mass >= target) & (count > 0)) if BY_MASS else (count >= wanted)  # a top_p of 0 keeps one
        high = tl.minimum(high, tl.min(tl.where(reached, pivots, high), 0))
        within = tl.minimum(within, tl.min(tl.where(reached, count, within), 0))
        low = tl.maximum(low, tl.max(tl.where(reached, low, pivots), 0))
        before = tl.maximum(before, tl.max(tl.where(reached, before, count), 0))
        below = tl.maximum(below, tl.max(tl.where(reached, below, mass), 0))
        going = (high - low > 1) & (within - before > 1)
        if not BY_MASS:
            going = going & (within > wanted)
        if going:
            pivots = tl.minimum(low + tl.maximum((high - low) // (PIVOTS + 1), 1) * (index + 1), high - 1)
            count, mass = _weigh(scores, pivots, top, temperature, BY_MASS, VOCAB, TILE)
    if BY_MASS:
        weight = tl.exp(-high.to(tl.float32, bitcast=True)).to(tl.float64)
        most = (within - before).to(tl.float64)
        at_limit = tl.maximum(tl.minimum(tl.ceil((target - below) / weight), most), 1.0).to(tl.int32)
    else:
        at_limit = wanted - before
    return high, before, within, at_limit


@triton.jit
def _nth_at(scores, limit, n, top, temperature, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The id of the n-th token, from 1, whose bits are the limit."""
    seen, found = n * 0, n * 0
    for begin in range(0, VOCAB, TILE):
        token = begin + tl.arange(0, TILE)
        _, bits = _distances(scores, token, top, temperature, VOCAB)
        same = (bits == limit).to(tl.int32)
        rank = seen + tl.cumsum(same, 0)
        found = tl.maximum(found, tl.max(tl.where((same == 1) & (rank == n), token, 0), 0))
        seen += tl.sum(same, 0)
    return found


@triton.jit
def _limit_and_last(
    scores, top, temperature, top_k, top_p, reach, VOCAB: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    limit, last = tl.full([], INFINITE, tl.int32), tl.full([], UNCUT, tl.int32)
    within = tl.full([], VOCAB, tl.int32)  # tokens up to the limit
    kept, before = within, within * 0  # of these, to be kept; before the limit
    if (top_k > 0) & (top_k < VOCAB):
        limit, before, within, at_limit = _search(scores, top, temperature, top_k, limit, within, False, VOCAB, TILE)
        kept = top_k
    if top_p < 1.0:
        found, before, counted, at_limit = _search(scores, top, temperature, top_p, limit, kept, True, VOCAB, TILE)
        within = tl.where(found < limit, counted, within)
        limit, kept = found, before + at_limit
    if reach < limit:
        limit = reach
    elif kept < within:
        last = _nth_at(scores, limit, kept - before, top, temperature, VOCAB, TILE)
    return limit, last


@triton.jit
def cut_kernel(
    scores, words, cuts,
    VOCAB: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr, CUT_WORDS: tl.constexpr,
):  # fmt: skip
    """Grid: (rows). scores float32 [rows, VOCAB], a row every STRIDE; cuts int32 [rows, CUT_WORDS], written.

    A row that asks for nothing, is greedy, or has nothing finite or something infinite, stays whole at no cost.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * STRIDE
    words += row * WORDS
    cuts += row * CUT_WORDS
    temperature = tl.load(words).to(tl.float32, bitcast=True)
    top_k, top_p, reach = tl.load(words + 1), tl.load(words + 2).to(tl.float32, bitcast=True), tl.load(words + 3)
    top, limit, last = tl.full([], 0.0, tl.float32), tl.full([], UNCUT, tl.int32), tl.full([], UNCUT, tl.int32)
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (reach < UNCUT)):
        key = _best_key(scores, VOCAB, TILE)
        if is_finite(key):
            top = value_of(key)
            limit, last = _limit_and_last(scores, top, temperature, top_k, top_p, reach, VOCAB, TILE)
    tl.store(cuts, top.to(tl.int32, bitcast=True))
    tl.store(cuts + 1, limit)
    tl.store(cuts + 2, last)


def cut(scores: torch.Tensor, stride: int, words: torch.Tensor) -> torch.Tensor:
    """Give int32 [rows, CUT_WORDS] for float32 scores [rows, vocab] and packed parameters, on their device."""
    rows, vocab = scores.shape
    cuts = torch.empty((rows, CUT_WORDS), dtype=torch.int32, device=scores.device)
    cut_kernel[(rows,)](scores, words, cuts, vocab, stride, TILE, WORDS, CUT_WORDS, num_warps=16)
    return cuts
