"""Changes single scores: `..adjust` on a GPU, one launch for all entries of a step, with the reference's bits.

For that division is rounded to nearest, and the launch says enable_fp_fusion=False: a product must be rounded before
something is taken off it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..adjust import NO_BIAS, Adjustments

COLUMNS = 5  # int32 of an entry: row, token, factor, subtract, bias; floats as their bits
ENTRIES = 512  # of a program


@triton.jit(do_not_specialize=["entries"])
def adjust_kernel(scores, words, entries, STRIDE: tl.constexpr, ENTRIES: tl.constexpr):
    """Grid: (ceil(entries / ENTRIES)).

    scores float32, a row every STRIDE, changed; words int32 [COLUMNS, entries], no two entries for one score.
    """
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    mask = entry < entries
    words += entry
    row, token = tl.load(words, mask=mask, other=0).to(tl.int64), tl.load(words + entries, mask=mask, other=0)
    words += 2 * entries.to(tl.int64)
    factor = tl.load(words, mask=mask, other=0).to(tl.float32, bitcast=True)
    subtract = tl.load(words + entries, mask=mask, other=0).to(tl.float32, bitcast=True)
    bias = tl.load(words + 2 * entries, mask=mask, other=0).to(tl.float32, bitcast=True)
    scores += row * STRIDE + token
    x = tl.load(scores, mask=mask, other=0.0)
    x = tl.where(x > 0.0, tl.div_rn(x, tl.where(mask, factor, 1.0)), x * factor) - subtract
    tl.store(scores, tl.where(bias == float("-inf"), bias, x + bias), mask=mask)


def pack(adjustments: Adjustments, pin: bool = False) -> torch.Tensor:
    """Pack entries as int32 [COLUMNS, entries] on the CPU, in pinned memory if so asked."""
    a = adjustments
    words = torch.empty((COLUMNS, len(a)), dtype=torch.int32, pin_memory=pin)
    words[0], words[1] = a.row, a.token
    numbers = words[2:].view(torch.float32)
    for at, (given, nothing) in enumerate(((a.factor, 1.0), (a.subtract, 0.0), (a.bias, NO_BIAS))):
        numbers[at] = nothing if given is None else given
    return words


def apply(scores: torch.Tensor, words: torch.Tensor) -> None:
    """Change `scores`, float32 [rows, vocab] with contiguous rows, in place; packed entries lie on their device.

    Nothing but the stride, and scores at an address that is no multiple of 16 bytes, takes another binary.
    """
    if scores.dtype != torch.float32 or (scores.shape[1] > 1 and scores.stride(1) != 1):
        raise ValueError(f"scores are {scores.dtype} with strides {scores.stride()}, not float32 with contiguous rows")
    entries = words.shape[1]
    if entries:
        stride = scores.stride(0) if len(scores) > 1 else scores.shape[1]
        adjust_kernel[(triton.cdiv(entries, ENTRIES),)](
            scores, words, entries, STRIDE=stride, ENTRIES=ENTRIES, num_warps=4, enable_fp_fusion=False
        )


def adjust(scores: torch.Tensor, adjustments: Adjustments) -> None:
    """`..adjust.adjust`: one copy to the device, from pinned memory without waiting for it, and one launch."""
    if len(adjustments):
        apply(scores, pack(adjustments, pin=scores.is_cuda).to(scores.device, non_blocking=True))
