"""Copies whole blocks of the KV cache, in every layer at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .. import block_copy as reference

_CHUNK, _WARPS = 2048, 4  # words of a program: 16 bytes of a thread, four times
_WORD = torch.int32


@triton.jit(do_not_specialize=["num_blocks"])
def _copy(cache_ptr, pairs_ptr, num_blocks, WORDS: tl.constexpr, CHUNK: tl.constexpr):
    """Copy a chunk of a block. grid: (pairs, layers · 2, ceil(WORDS / CHUNK)).

    cache [layers · 2, num_blocks, WORDS], pairs int64 [pairs, 2]: source and destination; no block is both.
    """
    pair, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source, destination = tl.load(pairs_ptr + 2 * pair), tl.load(pairs_ptr + 2 * pair + 1)
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    cache_ptr += plane * num_blocks * WORDS + word
    values = tl.load(cache_ptr + source * WORDS, mask=word < WORDS)
    tl.store(cache_ptr + destination * WORDS, values, mask=word < WORDS)


def copy_blocks(cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """`block_copy.copy_blocks`: cache [layers, 2, num_blocks, block_size, kv_heads, width], of any type and layout.

    Blocks are copied side by side where no source is a destination, which is read off the pairs here. Other pairs, and
    a cache that is not contiguous or has blocks that are no words of four bytes, are left to torch.
    """
    layers, _, num_blocks = cache.shape[:3]
    block_bytes = cache[0, 0, 0].numel() * cache.element_size()
    words = block_bytes // _WORD.itemsize
    mixed = not {source for source, _ in pairs}.isdisjoint(destination for _, destination in pairs)
    if mixed or not cache.is_contiguous() or block_bytes % _WORD.itemsize:
        reference.copy_blocks(cache.view(torch.uint8), pairs)  # torch moves no float8
        return
    on_device = torch.tensor(pairs, dtype=torch.int64, pin_memory=cache.is_cuda).to(cache.device, non_blocking=True)
    if len(pairs):
        _copy[(len(pairs), layers * 2, triton.cdiv(words, _CHUNK))](
            cache.view(-1).view(_WORD), on_device, num_blocks, WORDS=words, CHUNK=_CHUNK, num_warps=_WARPS
        )
