"""Copies of blocks by a Triton kernel, against plain indexing."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from headrace.kernels.gpu import block_copy
from tests.support.mutations import Fault, assert_found

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A cache of random bytes, NaN among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def check_copy(module: ModuleType, cache: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Every byte of the cache is what it must be, those of the other blocks included."""
    want = cache.view(torch.uint8).clone()
    for (_, destination), block in zip(pairs, [want[:, :, source].clone() for source, _ in pairs], strict=True):
        want[:, :, destination] = block
    module.copy_blocks(cache, pairs)
    assert torch.equal(cache.view(torch.uint8), want)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("block_size", "kv_heads", "width"),
    [
        (4, 1, 10),  # less than a chunk
        (16, 4, 128),  # whole chunks, in all types
        (16, 3, 100),  # chunks and a part of one
        (1, 1, 9),  # in one byte each, no words
    ],
)
def test_copies(dtype: torch.dtype, block_size: int, kv_heads: int, width: int) -> None:
    cache = noise((2, 2, 7, block_size, kv_heads, width), dtype)
    check_copy(block_copy, cache, [(1, 6), (4, 2), (1, 0)])


@pytest.mark.parametrize("pairs", [[(1, 2), (2, 3)], [(2, 3), (1, 2)], [(1, 2), (2, 1)], [(1, 1)], [(0, 4), (0, 1)]])
def test_sources_are_read_before_destinations_are_written(pairs: list[tuple[int, int]]) -> None:
    check_copy(block_copy, noise((2, 2, 5, 4, 2, 16), torch.bfloat16), pairs)


def test_a_part_of_a_cache() -> None:
    cache = noise((3, 2, 5, 4, 2, 16), torch.bfloat16)
    check_copy(block_copy, cache[1:], [(0, 4)])
    check_copy(block_copy, cache[:, :, 1:], [(0, 3)])


def test_no_pairs() -> None:
    check_copy(block_copy, noise((1, 2, 2, 4, 1, 4), torch.float32), [])


def check_small(module: ModuleType) -> None:
    check_copy(module, noise((2, 2, 5, 16, 3, 100), torch.float16), [(1, 4), (3, 0)])
    check_copy(module, noise((1, 2, 5, 4, 1, 16), torch.float16), [(1, 2), (2, 3)])


FAULTS = [
    Fault("block_copy", "word < WORDS", "word < WORDS - 1", times=2),
    Fault("block_copy", "word < WORDS", "word < WORDS + 1", times=2),
    Fault("block_copy", "triton.cdiv(words, _CHUNK)", "max(1, words // _CHUNK)"),
    Fault("block_copy", "layers * 2, triton", "layers, triton"),
    Fault("block_copy", "plane * num_blocks * WORDS", "plane * WORDS"),
    Fault("block_copy", "if mixed or not", "if not"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_fault_is_found(fault: Fault) -> None:
    assert_found(fault, check_small, "block_copy")
