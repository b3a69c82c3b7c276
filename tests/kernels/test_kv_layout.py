"""The layouts of the cache, and int8 vectors: what is lost, what stays, and what is not finite."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.backend import Backend
from headrace.kernels.block_copy import copy_blocks
from headrace.kernels.kv_layout import (
    SCALE_BYTES,
    by_position,
    cached_head_dim,
    cached_width,
    decode,
    encode,
    laid_out,
    poison,
)  # fmt: skip

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@DTYPES
@pytest.mark.parametrize("keys", [True, False])
def test_a_layout_holds_every_value_where_it_says(dtype: torch.dtype, keys: bool) -> None:
    block_size, kv_heads, head_dim = 5, 3, 6
    plain = encode(randn(4, block_size, kv_heads, head_dim), dtype)
    cache = laid_out(plain, "by_head", keys=keys)
    assert (cache.shape, cache.dtype) == (plain.shape, plain.dtype)
    together = 2 if dtype == torch.bfloat16 else 1
    for block, offset, head, d in ((0, 0, 0, 0), (1, 4, 2, 5), (3, 2, 1, 3)):
        in_keys = (head * head_dim + d // together * together) * block_size + offset * together + d % together
        at = in_keys if keys else (head * block_size + offset) * head_dim + d
        assert cache[block].flatten()[at] == plain[block, offset, head, d]
    if dtype == torch.int8:
        scales = cache[2].flatten()[block_size * kv_heads * head_dim :].clone().view(torch.float32)
        assert scales[1 * block_size + 3] == plain[2, 3, 1, head_dim:].clone().view(torch.float32)
    assert torch.equal(by_position(cache, "by_head", keys=keys), plain)
    assert torch.equal(by_position(laid_out(plain, "by_position", keys=keys), "by_position", keys=keys), plain)


@DTYPES
def test_the_width_of_a_cached_vector(dtype: torch.dtype) -> None:
    vectors = encode(randn(3, 10), dtype)
    assert vectors.shape[-1] == cached_width(10, dtype) == 10 + SCALE_BYTES * (dtype == torch.int8)
    assert cached_head_dim(vectors) == 10


def test_int8_is_within_half_a_step_and_keeps_the_largest_value_and_zero() -> None:
    vectors = randn(200, 64) * torch.logspace(-30, 30, 200).unsqueeze(1)
    vectors[7] = 0.0
    got = decode(encode(vectors, torch.int8)).double()
    largest = vectors.double().abs().amax(-1, keepdim=True)
    # half a step of max / 127; scale, quotient and product are each rounded once, to 2⁻²⁴ of up to 127 steps
    assert ((got - vectors).abs() <= largest / 127 * (0.5 + 3 * 127 * 2.0**-24)).all()
    assert (got[7] == 0).all()
    at = largest == vectors.abs()
    assert ((got.abs() - largest).abs()[at] <= 3 * 2.0**-24 * largest.expand_as(got)[at]).all()
    errors = (got - vectors)[100] / (largest[100] / 127)
    assert errors.abs().max() > 0.3, "nothing was rounded"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_int8_vector_that_is_not_finite_comes_out_so(value: float) -> None:
    vectors = randn(3, 20)
    vectors[1, 13] = value
    got = decode(encode(vectors, torch.int8))
    assert torch.isnan(got[1]).all()
    assert torch.isfinite(got[[0, 2]]).all()


@DTYPES
@pytest.mark.parametrize("layout", ["by_position", "by_head"])
def test_poison_reaches_every_vector_of_its_blocks_and_no_other(dtype: torch.dtype, layout: str) -> None:
    plain = encode(randn(5, 4, 2, 6), dtype)
    cache = torch.stack([laid_out(plain, layout, keys=keys) for keys in (True, False)])[None].clone()  # type: ignore[arg-type]
    poison(cache, [1, 4])
    for number in (0, 1):
        got = by_position(cache[0, number], layout, keys=number == 0)  # type: ignore[arg-type]
        assert torch.isnan(decode(got[[1, 4]])).all()
        assert torch.equal(got[[0, 2, 3]], plain[[0, 2, 3]])


@DTYPES
def test_copied_blocks_are_the_same_in_every_layout(ops: Backend, dtype: torch.dtype) -> None:
    plain = encode(randn(5, 4, 2, 6), dtype)
    cache = torch.stack([laid_out(plain, ops.kv_layout, keys=keys) for keys in (True, False)])[None].clone()
    copy_blocks(cache, [(3, 0)])
    for number in (0, 1):
        got = by_position(cache[0, number], ops.kv_layout, keys=number == 0)
        assert torch.equal(got, plain[[3, 1, 2, 3, 4]])
