"""Checks of attention kernels that take the module they check, so that they can be shown a faulty one.

decoded(decode, make_case([(37, 1)]), window=9)
prefilled(prefill, make_case([(37, 5)]), soft_cap=5.0)
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from types import ModuleType

import torch

from tests.support.paged_cases import NOBODY, Case, poisoned_scratch

SPLIT = 64
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, for which Python 3.11 has no name


def decoded(
    decode: ModuleType, case: Case, split: int = SPLIT, splits: int = 0, *, compare: bool = True, **options: object
) -> torch.Tensor:
    """The result, and that it is right: written into NaN, with scratch of NaN for the longest or for so many splits."""
    how, out = case.how(**options), case.empty_out()
    splits = splits or max(1, *(-(-keys // split) for keys, _ in case.lengths), 1)
    scratch = poisoned_scratch(case, splits, split)
    decode.decode_attention(case.query, case.k_cache, case.v_cache, case.paging, out, how, scratch)
    if compare:
        case.check(out, how, case.rows_of(1))
    return out


def prefilled(
    prefill: ModuleType, case: Case, capability: int = 90, *, compare: bool = True, **options: object
) -> torch.Tensor:
    """The result, and that it is right: rows of single queries, of sequences without keys and of padding stay NaN."""
    how, out = case.how(**options), case.empty_out()
    prefill.prefill_attention(case.query, case.k_cache, case.v_cache, case.paging, out, how, capability)
    if compare:
        case.check(out, how, case.rows_of() & ~case.rows_of(1))
    return out


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until they are written, nor count as if they did."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def far_blocks(case: Case) -> Case:
    """The case with its blocks at the end of caches of more than 2³¹ values, of which nothing else is ever touched."""
    block_values = case.k_cache[0].numel()
    blocks = 2**31 // block_values + 1 + len(case.k_cache)
    shape = (blocks, *case.k_cache.shape[1:])
    caches = [untouched(shape, case.k_cache.dtype) for _ in range(2)]
    for cache, few in zip(caches, (case.k_cache, case.v_cache), strict=True):
        cache[blocks - len(few) :] = few
    table = case.paging.block_table
    table = torch.where(table == NOBODY, table, table + (blocks - len(case.k_cache)))
    assert int(table.min()) * block_values >= 2**31
    return replace(case, k_cache=caches[0], v_cache=caches[1], paging=replace(case.paging, block_table=table))
