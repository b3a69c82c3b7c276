"""Rotary embedding of a part of each head or of none, and the norm before it, against float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.backend import Backend
from headrace.kernels.kv_layout import by_position, decode, encode, laid_out
from headrace.kernels.rotary import QueryKeyNorm
from tests.support.tolerances import assert_close

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ROWS, BLOCK_SIZE, BLOCKS, EPS = 9, 4, 6, 1e-3
POSITIONS = torch.tensor([0, 1, 2, 40, 41, 7, 3, 99, 5])
SLOTS = torch.tensor([22, 23, 0, -1, 5, 9, 11, -1, 14])


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    together = x.double().reshape(len(x), -1, len(weight))
    return (together / (together.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()).view(x.shape)


def turned64(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The first values of x [rows, heads, head_dim] as complex numbers, turned by angles [rows, rotary_dim / 2]."""
    half = angles.shape[1]
    numbers = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = numbers * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), dim=-1)


def table(rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles, and the table that an operation takes."""
    angles = torch.outer(torch.arange(100, dtype=torch.float64), torch.linspace(1, 0.01, rotary_dim // 2).double())
    return angles, torch.cat((angles.cos(), angles.sin()), dim=1).float()


def norms(kind: str, heads: int, kv_heads: int, head_dim: int) -> QueryKeyNorm | None:
    if kind == "none":
        return None
    sizes = (head_dim, head_dim) if kind == "head" else (heads * head_dim, kv_heads * head_dim)
    return QueryKeyNorm(randn(sizes[0], seed=1), randn(sizes[1], seed=2), EPS)


@DTYPES
@pytest.mark.parametrize("kind", ["none", "head", "row"])
@pytest.mark.parametrize("rotary_dim", [None, 2, 12, 40])  # none, the least, a part that is no vector, and all
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (7, 1)])
def test_rotations(
    ops: Backend, dtype: torch.dtype, kind: str, rotary_dim: int | None, heads: int, kv_heads: int
) -> None:
    head_dim = 40
    qkv = randn(ROWS, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    before, norm = qkv.clone(), norms(kind, heads, kv_heads, head_dim)
    angles, cos_sin = table(rotary_dim or 2)
    poisoned = torch.full((BLOCKS, BLOCK_SIZE, kv_heads, head_dim), float("nan"), dtype=dtype)
    caches = [poisoned.clone() for _ in range(2)]
    query = ops.rotate_and_store(qkv, POSITIONS, None if rotary_dim is None else cos_sin, *caches, SLOTS, norm)
    assert torch.equal(qkv, before), "the input was changed"
    q, k, v = qkv.view(ROWS, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        q, k = normed64(q, norm.query), normed64(k, norm.key)
    if rotary_dim is not None:
        q, k = turned64(q, angles[POSITIONS]), turned64(k, angles[POSITIONS])
    assert query.is_contiguous()
    assert_close(query, q)
    live = SLOTS >= 0
    plain = (by_position(cache, ops.kv_layout, keys=number == 0) for number, cache in enumerate(caches))
    keys, values = (cache.view(-1, kv_heads, head_dim) for cache in plain)
    assert_close(keys[SLOTS[live]], k[live])
    assert torch.equal(values[SLOTS[live]], v[live])
    untouched = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    untouched[SLOTS[live]] = False
    assert keys[untouched].isnan().all() and values[untouched].isnan().all()


@pytest.mark.parametrize("kind", ["head", "row"])
def test_bits_do_not_depend_on_the_batch(ops: Backend, threads: int, kind: str) -> None:
    heads, kv_heads, head_dim = 4, 2, 24
    qkv, norm = randn(300, 8 * head_dim), norms(kind, heads, kv_heads, head_dim)
    cos_sin = randn(300, 16)

    def call(begin: int, count: int) -> torch.Tensor:
        caches = [torch.zeros(300, 1, kv_heads, head_dim) for _ in range(2)]
        at = torch.arange(begin, begin + count)
        query = ops.rotate_and_store(qkv[begin : begin + count].clone(), at, cos_sin, *caches, at, norm)
        keys, values = (by_position(cache, ops.kv_layout, keys=number == 0) for number, cache in enumerate(caches))
        return torch.cat((query, keys[at, 0], values[at, 0]), dim=1)

    whole = call(0, 300)
    for begin, count in ((0, 1), (7, 3), (100, 70), (299, 1)):
        assert torch.equal(call(begin, count), whole[begin : begin + count])


@pytest.mark.parametrize("kind", ["head", "row"])
def test_an_int8_cache_holds_what_the_exact_one_does_in_steps(ops: Backend, kind: str) -> None:
    heads, kv_heads, head_dim = 4, 2, 40
    qkv, norm, (_, cos_sin) = randn(ROWS, 8 * head_dim), norms(kind, heads, kv_heads, head_dim), table(12)
    exact = [torch.zeros(BLOCKS, BLOCK_SIZE, kv_heads, head_dim) for _ in range(2)]
    rounded = [laid_out(encode(cache, torch.int8), ops.kv_layout, keys=n == 0) for n, cache in enumerate(exact)]
    queries = [ops.rotate_and_store(qkv, POSITIONS, cos_sin, *caches, SLOTS, norm) for caches in (exact, rounded)]
    assert torch.equal(*queries)
    for number in range(2):
        want, got = (by_position(caches[number], ops.kv_layout, keys=number == 0) for caches in (exact, rounded))
        step = want.abs().amax(-1, keepdim=True) / 127
        # half a step; the scale, the quotient and the product may round by 2⁻²⁴ of up to 127 steps each
        assert ((decode(got) - want).abs() <= step * (0.5 + 8 * 127 * 2.0**-24)).all()
