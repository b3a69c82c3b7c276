"""Log-probabilities of chosen tokens and of the best ones: `..logprobs` on a GPU.

    block   a program a block of 4,096 tokens of a row: its best score, the sum of exp(score - best), its k best ones
    finish  a program a row: the sum over all blocks, and the k best of the blocks' best, merged one by one

k is a number in memory, each row its own: one binary serves all, and a row's sums do not know what another asked.

How exact. For a score at distance d below the row's best, whose true log-probability is -(d + L), L = log(S),
S = Σ exp(-d) from 1 to the number of tokens, let u = 2⁻²⁴.

    a term of S    exp is off by a relative 4 · u + 2 · u · d (see `cut`), its argument by u · d: 4 · u + 3 · u · d, for
                   the distance within a block and for that of the block from the best. Weighted by the terms'
                   probabilities, d is on average the entropy less L, at most log(tokens) - L: below 12 for 152,000
    sums           in a block 15 · u in a thread and 8 · u among threads, 1 · u for its weight, 8 · u for all blocks
    so S           is off by a relative 8 · u + 36 · u + 32 · u = 76 · u, and so is L, absolutely
    log(S)         another 2 · u · L + u (see `philox`), L < 12
    the result     u · d for the distance, u · (d + L) for the last subtraction

Altogether below 2 · u · (d + L) + 101 · u, for up to 152,000 tokens: within 2⁻¹⁷ + 2⁻²³ · |log-probability|.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..logprobs import width_of
from .order import candidate, token_of, value_of
from .philox import natural_log
from .shapes import power_of_two

BLOCK = 4096  # tokens of a program; fixed, or a row's bits would change
NOTHING = tl.constexpr(-(2**63))  # below every candidate


@triton.jit(do_not_specialize=["width"])
def block_kernel(
    scores, asked, sums, best, width,
    VOCAB: tl.constexpr, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks, asked rows).

    scores float32 [rows, VOCAB], a row every STRIDE; asked int32 [asked rows, 2]: row, k; sums float32
    [asked rows, BLOCKS, 2], written: best score, sum relative to it; best int64 [asked rows, BLOCKS, width], written
    up to a row's k: candidates of a block, the best first, then NOTHING.
    """
    block, at = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, k = tl.load(asked + 2 * at).to(tl.int64), tl.load(asked + 2 * at + 1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(scores + row * STRIDE + token, mask=token < VOCAB, other=float("-inf"))
    top = tl.max(x, 0)
    place = at * BLOCKS + block
    tl.store(sums + 2 * place, top)
    tl.store(sums + 2 * place + 1, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))
    left = candidate(x, token)  # what is behind the vocabulary is the last of all
    for nth in range(0, tl.minimum(k, BLOCK)):
        first = tl.max(left, 0)
        tl.store(best + place * width + nth, first)
        left = tl.where(left == first, NOTHING, left)


@triton.jit(do_not_specialize=["width"])
def finish_kernel(
    scores, asked, chosen, sums, best, found, width,
    STRIDE: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (asked rows).

    chosen int64 [rows]; found int32 [asked rows, 1 + 2 · width], written up to a row's k; PADDED: BLOCKS, up to a power
    of two; the rest as for the blocks.
    """
    at = tl.program_id(0).to(tl.int64)
    row, k = tl.load(asked + 2 * at).to(tl.int64), tl.load(asked + 2 * at + 1)
    block = tl.arange(0, PADDED)
    inside = block < BLOCKS
    sums += 2 * (at * BLOCKS + block)
    tops = tl.load(sums, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    total = tl.sum(tl.load(sums + 1, mask=inside, other=0.0) * tl.exp(tops - top), 0)
    log_total = tl.where(total == total, natural_log(total), total)
    found += at * (1 + 2 * width)
    own = tl.load(scores + row * STRIDE + tl.load(chosen + row))
    tl.store(found, (own - top - log_total).to(tl.int32, bitcast=True))
    best += (at * BLOCKS + block) * width
    head = tl.load(best, mask=block < tl.where(k > 0, BLOCKS, 0), other=NOTHING)  # of each block, the best that is left
    taken = block * 0
    for nth in range(0, k):
        first = tl.max(head, 0)
        value = value_of((first >> 32).to(tl.int32)) - top - log_total
        tl.store(found + 1 + nth, token_of(first))
        tl.store(found + 1 + width + nth, value.to(tl.int32, bitcast=True))
        mine = head == first
        taken += mine.to(tl.int32)
        more = tl.load(best + taken, mask=mine & inside & (taken < tl.minimum(k, BLOCK)), other=NOTHING)
        head = tl.where(mine, more, head)


def logprobs(scores: torch.Tensor, rows: Sequence[int], chosen: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """`..logprobs.logprobs`: one copy to the device, two launches, and nothing that waits.

    A row's tokens are contiguous, rows may lie apart, and may be asked for in any order. Scores at an address that is
    no multiple of 16 bytes take another binary; nothing else but the vocabulary and the stride does.
    """
    vocab = scores.shape[1]
    if scores.dtype != torch.float32 or (vocab > 1 and scores.stride(1) != 1):
        raise ValueError(f"scores are {scores.dtype} with strides {scores.stride()}, not float32 with contiguous rows")
    width, blocks, device = width_of(counts, vocab), triton.cdiv(vocab, BLOCK), scores.device
    found = torch.empty((len(rows), 1 + 2 * width), dtype=torch.int32, device=device)
    if not len(rows):
        return found
    words = [(row, min(count, vocab)) for row, count in zip(rows, counts, strict=True)]
    asked = torch.tensor(words, dtype=torch.int32, pin_memory=scores.is_cuda).to(device, non_blocking=True)
    sums = torch.empty((len(rows), blocks, 2), device=device)
    best = torch.empty((len(rows), blocks, max(width, 1)), dtype=torch.int64, device=device)
    stride = scores.stride(0) if len(scores) > 1 else vocab
    block_kernel[blocks, len(rows)](scores, asked, sums, best, width, vocab, stride, blocks, BLOCK, num_warps=8)
    finish_kernel[(len(rows),)](
        scores, asked, chosen.to(device, non_blocking=True), sums, best, found, width,
        stride, blocks, power_of_two(blocks), BLOCK, num_warps=1,
    )  # fmt: skip
    return found
