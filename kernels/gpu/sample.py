"""Draws one token a row from scores over the vocabulary: `..sample` on a GPU.

    race    a program a block of 2,048 tokens: its best score, and the id that wins the race in it
    finish  a program a row: the race of those winners
    cut     (`cut`; only if a row asks) a program a row, before the race: what top_k, top_p and min_p leave

The race is that of the reference but for rounding. A block compares scores relative to its own best, so an error does
not grow with the scores; the finish compares the blocks' winners relative to the row's best, as the reference does.
For a token at distance d = (best - score) / temperature with noise g, the two differ by at most

    2⁻²² · (1 + |g| + 2 · d)

in a race value: by 2⁻²² + 2⁻²³ · |g| in the noise (see `philox`), by 2⁻²³ · d in either's distance (a subtraction and
a division), by 2⁻²⁴ · (|g| + d) in the sum. Only where d < 22.9 + 3.2 can a token win, so that is below 2⁻¹⁵·⁷; a
block's winner may lose to another by mistake and pass this on to the next, so the token is the reference's unless its
race value is less than 4 · 2⁻¹⁵·⁷ < 2⁻¹³ below the reference's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sample import SampleParameters
from .cut import CUT_WORDS, UNCUT, cut
from .order import LARGEST_ID, LOWEST, candidate, distance, is_finite, token_of, value_of
from .packing import WORDS, PackedParameters, pack
from .philox import gumbel, philox_words, token_word
from .shapes import power_of_two

BLOCK = 2048  # tokens of a program of the race; fixed, or a row's bits would change


@triton.jit
def _asked(words, row, WORDS: tl.constexpr):
    """A row's temperature, seed, choice and position."""
    own = words + row * WORDS
    low, high = tl.load(own + 4).to(tl.uint32, bitcast=True), tl.load(own + 5)
    seed = (high.to(tl.int64) << 32) | low.to(tl.int64)
    return tl.load(own).to(tl.float32, bitcast=True), seed, tl.load(own + 6), tl.load(own + 7)


@triton.jit
def _four(first, second, third, fourth):
    """Four vectors [n] as one tensor [n, 2, 2]: what follows is written, and done, once."""
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _load(scores, token, VOCAB: tl.constexpr):
    return tl.load(scores + token, mask=token < VOCAB, other=float("-inf"))


@triton.jit
def _best_of_block(x):
    return tl.max(tl.max(tl.max(x, 2), 1), 0)


@triton.jit
def race_kernel(
    scores, words, cuts, partial,
    VOCAB: tl.constexpr, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    WORDS: tl.constexpr, CUT_WORDS: tl.constexpr, HAS_CUTS: tl.constexpr, HAS_DRAWS: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks, rows).

    scores float32 [rows, VOCAB], a row every STRIDE; words int32 [rows, WORDS]; cuts int32 [rows, CUT_WORDS], read if
    HAS_CUTS; partial int64 [rows, BLOCKS], written: the key of the block's best score (high half) and the id that
    wins in it (low half).
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    scores += row * STRIDE
    temperature, seed, choice, position = _asked(words, row, WORDS)
    place = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    first = place // 16 * 64 + place % 16  # one counter serves four tokens, 16 apart
    token = _four(first, first + 16, first + 32, first + 48)
    x = _four(
        _load(scores, first, VOCAB), _load(scores, first + 16, VOCAB),
        _load(scores, first + 32, VOCAB), _load(scores, first + 48, VOCAB),
    )  # fmt: skip
    if HAS_CUTS:
        cuts += row * CUT_WORDS
        top, limit, last = tl.load(cuts).to(tl.float32, bitcast=True), tl.load(cuts + 1), tl.load(cuts + 2)
        if limit != UNCUT:
            bits = distance(top, x, temperature).to(tl.int32, bitcast=True)
            x = tl.where((bits < limit) | ((bits == limit) & (token <= last)), x, float("-inf"))
    best = _best_of_block(candidate(x, token))
    key = (best >> 32).to(tl.int32)
    winner = token_of(best)
    if HAS_DRAWS:
        if temperature > 0.0:
            anchor = tl.where(is_finite(key), value_of(key), 0.0)
            p, q, r, s = philox_words(place, seed, choice, position)
            race = gumbel(_four(p, q, r, s)) - distance(anchor, x, temperature)
            winner = token_of(_best_of_block(candidate(race, token)))
    tl.store(partial + row * BLOCKS + block, (key.to(tl.int64) << 32) | winner.to(tl.int64))


@triton.jit
def finish_kernel(
    scores, words, partial, tokens,
    VOCAB: tl.constexpr, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr,
    WORDS: tl.constexpr, HAS_DRAWS: tl.constexpr,
):  # fmt: skip
    """Grid: (rows). tokens int64 [rows], written; the rest as for the race; PADDED: BLOCKS, up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * STRIDE
    temperature, seed, choice, position = _asked(words, row, WORDS)
    block = tl.arange(0, PADDED)
    found = tl.load(partial + row * BLOCKS + block, mask=block < BLOCKS, other=-(2**63))
    token, key = (found & LARGEST_ID).to(tl.int32), (found >> 32).to(tl.int32)
    x = tl.load(scores + token, mask=(block < BLOCKS) & (token < VOCAB), other=float("-inf"))
    x = tl.where(key == LOWEST, float("-inf"), x)  # nothing of its block is left: its winner is none
    best = tl.max(tl.where(block < BLOCKS, candidate(x, token), -(2**63)), 0)
    winner = token_of(best)
    if HAS_DRAWS:
        if temperature > 0.0:
            winner = 0  # of a row that has nothing to choose by
            top = tl.max(key, 0)
            if is_finite(top):
                noise = gumbel(token_word(token, seed, choice, position))
                race = candidate(noise - distance(value_of(top), x, temperature), token)
                winner = token_of(tl.max(tl.where(block < BLOCKS, race, -(2**63)), 0))
    tl.store(tokens + row, winner.to(tl.int64))


def draw(scores: torch.Tensor, parameters: PackedParameters) -> torch.Tensor:
    """Draw a token id for each row of `scores`, float32 [rows, vocab], left alone. Result: int64 [rows], its device.

    `parameters.words` lies on the device of the scores. A row's tokens are contiguous. A NaN counts as the best score
    of a row at temperature 0, and makes the others 0, as in the reference. Scores at an address that is no multiple
    of 16 bytes take another binary; nothing else but the vocabulary, the stride and the two flags does.
    """
    rows, vocab = scores.shape
    if scores.dtype != torch.float32 or (vocab > 1 and scores.stride(1) != 1):
        raise ValueError(f"scores are {scores.dtype} with strides {scores.stride()}, not float32 with contiguous rows")
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if not rows:
        return tokens
    stride = scores.stride(0) if rows > 1 else vocab
    blocks = -(-vocab // BLOCK)
    partial = torch.empty((rows, blocks), dtype=torch.int64, device=scores.device)
    cuts = cut(scores, stride, parameters.words) if parameters.cuts else parameters.words
    race_kernel[blocks, rows](
        scores, parameters.words, cuts, partial, vocab, stride, blocks, BLOCK, WORDS, CUT_WORDS,
        parameters.cuts, parameters.draws, num_warps=8,
    )  # fmt: skip
    finish_kernel[(rows,)](
        scores, parameters.words, partial, tokens, vocab, stride, blocks, power_of_two(blocks), WORDS,
        parameters.draws, num_warps=4,
    )  # fmt: skip
    return tokens


def sample(scores: torch.Tensor, parameters: SampleParameters) -> torch.Tensor:
    """`..sample.sample`, but that the result, int64 [rows], stays on the device of the scores."""
    return draw(scores, pack(parameters).to(scores.device))
