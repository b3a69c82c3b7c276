"""Norm, rotation and the store of keys and values by one Triton kernel, against float64 and `kv_layout`."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from headrace.kernels.gpu import rotary
from headrace.kernels.kv_layout import FLOAT8_LARGEST
from headrace.kernels.rotary import QueryKeyNorm
from tests.support.rotary_checks import (
    EPS,
    POSITIONS,
    ROWS,
    SHAPES,
    SLOTS,
    TYPES,
    Shape,
    caches_of,
    check_bytes,
    check_every_float8,
    check_floats,
    check_odd_int8,
    check_rounded,
    norm_of,
    qkv_of,
    randn,
    table_of,
    vectors,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of values that are meant not to be finite
SOME = SHAPES[:4]


@pytest.mark.parametrize(("shape", "dtype"), [
    *((shape, torch.float32) for shape in SHAPES), *product(SOME, (torch.bfloat16, torch.float16))
], ids=str)  # fmt: skip
def test_rotations(shape: Shape, dtype: torch.dtype) -> None:
    check_floats(rotary, shape, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.int8) for shape in SHAPES), *product(SOME, FLOAT8_LARGEST)], ids=str
)
def test_caches_that_round(shape: Shape, dtype: torch.dtype) -> None:
    check_rounded(rotary, shape, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [Shape(16, None, 2, 3), Shape(10, None, 1, 1), Shape(96, None, 2, 12)], ids=str)
def test_bytes_of_a_cache(dtype: torch.dtype, shape: Shape) -> None:
    check_bytes(rotary, shape, dtype)


@pytest.mark.parametrize("dtype", FLOAT8_LARGEST)
def test_every_float8(dtype: torch.dtype) -> None:
    check_every_float8(rotary, dtype)


def test_odd_int8() -> None:
    check_odd_int8(rotary)


@pytest.mark.parametrize("norm", ["head", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_rows_do_not_depend_on_their_neighbours(norm: str, dtype: torch.dtype) -> None:
    shape = Shape(24, 16, 4, 2, norm)
    qkv = qkv_of(shape)

    def call(rows: slice) -> list[torch.Tensor]:
        caches = caches_of(shape, dtype)
        query = rotary.rotate_and_store(
            qkv[rows], POSITIONS[rows], table_of(shape), *caches, SLOTS[rows], norm_of(shape)
        )
        at = SLOTS[rows]
        return [query, *(vectors(cache)[at[at >= 0]] for cache in caches)]

    whole = call(slice(0, ROWS))
    for row, stored in ((0, 0), (3, 2), (4, 3)):
        query, key, value = call(slice(row, row + 1))
        assert torch.equal(query[0], whole[0][row])
        assert torch.equal(key[0], whole[1][stored]) and torch.equal(value[0], whole[2][stored])


def test_what_does_not_lie_together() -> None:
    """Rows and numbers with others between them, and a table that is part of a wider one."""
    shape = Shape(24, 16, 4, 2, "head")
    qkv, table = qkv_of(shape), table_of(shape)
    assert table is not None
    apart = [torch.stack((each, torch.full_like(each, -1)), dim=-1)[..., 0] for each in (qkv, POSITIONS, table, SLOTS)]
    found = []
    for rows, positions, angles, slots in ((qkv, POSITIONS, table, SLOTS), apart):
        caches = caches_of(shape, torch.float32)
        query = rotary.rotate_and_store(rows, positions, angles, *caches, slots, norm_of(shape))
        found.append([query, *map(vectors, caches)])
    assert not apart[0].is_contiguous()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_what_is_refused() -> None:
    shape = Shape(16, 16, 4, 2)
    rest = (POSITIONS, table_of(shape))
    for dtype in FLOAT8_LARGEST:
        with pytest.raises(ValueError, match="kv_scales"):
            rotary.rotate_and_store(qkv_of(shape), *rest, *caches_of(shape, dtype), SLOTS)
    keys, values = caches_of(shape, torch.float32)
    with pytest.raises(ValueError, match="one behind the other"):
        rotary.rotate_and_store(qkv_of(shape), *rest, keys[::2], values[::2], SLOTS)
    with pytest.raises(ValueError, match="one behind the other"):
        rotary.rotate_and_store(qkv_of(shape), *rest, keys, torch.cat((values, values))[::2], SLOTS)
    with pytest.raises(ValueError, match="multiple of four"):
        odd = torch.zeros(2, 3, 1, 1, 10 + 4, dtype=torch.int8)
        rotary.rotate_and_store(randn(1, 30), POSITIONS[:1], None, *odd, SLOTS[:1])
    with pytest.raises(ValueError, match="32 values"):
        norm = QueryKeyNorm(torch.ones(32), torch.ones(32), EPS)
        rotary.rotate_and_store(qkv_of(shape), *rest, keys, values, SLOTS, norm)


def test_no_rows() -> None:
    shape = Shape(16, 16, 4, 2)
    caches = caches_of(shape, torch.float32)
    query = rotary.rotate_and_store(qkv_of(shape)[:0], POSITIONS[:0], table_of(shape), *caches, SLOTS[:0])
    assert query.shape == (0, 4, 16)
