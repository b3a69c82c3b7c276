"""Norm, gated activation, rotary embedding with its store, embedding and block copy, against float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import exact
from headrace.kernels.backend import Backend
from headrace.kernels.block_copy import copy_blocks
from headrace.kernels.kv_layout import SCALE_BYTES, by_position, decode, encode, laid_out
from headrace.kernels.large_pages import zeros_in_large_pages
from tests.support.matrices import packed
from tests.support.tolerances import assert_close

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ROWS = (1, 2, 3, 5, 17, 64, 70)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@DTYPES
@pytest.mark.parametrize("hidden", [1, 16, 37, 64, 576, 3072])
def test_rms_norm(ops: Backend, dtype: torch.dtype, hidden: int) -> None:
    x, weight = randn(5, hidden, dtype=dtype) * 3, randn(hidden, seed=1)
    before = x.clone()
    assert_close(ops.rms_norm(x, weight, 1e-5), norm64(x, weight, 1e-5))
    assert torch.equal(x, before), "the input was changed"


@DTYPES
@pytest.mark.parametrize("hidden", [1, 37, 64, 576])
def test_add_rms_norm_leaves_its_inputs_alone(ops: Backend, dtype: torch.dtype, hidden: int) -> None:
    x, residual = randn(6, hidden, dtype=dtype), randn(6, hidden, dtype=dtype, seed=2)
    weight = randn(hidden, seed=1)
    copies = x.clone(), residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_close(normed, norm64(total, weight, 1e-5))
    assert torch.equal(x, copies[0]) and torch.equal(residual, copies[1]), "an input was changed"


def test_rms_norm_of_zero_and_of_nan(ops: Backend) -> None:
    x = torch.zeros(3, 20)
    x[1, 7] = float("nan")
    got = ops.rms_norm(x, torch.ones(20), 1e-5)
    assert (got[0] == 0).all() and torch.isnan(got[1]).all() and (got[2] == 0).all()


@DTYPES
@pytest.mark.parametrize("width", [1, 16, 37, 1536])
def test_silu_mul(ops: Backend, dtype: torch.dtype, width: int) -> None:
    gate_up = randn(5, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(ops.silu_mul(gate_up), gate * torch.sigmoid(gate) * up)


@DTYPES
@pytest.mark.parametrize("width", [1, 16, 37, 1536])
def test_gelu_mul(ops: Backend, dtype: torch.dtype, width: int) -> None:
    gate_up = randn(5, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(ops.gelu_mul(gate_up), torch.nn.functional.gelu(gate, approximate="tanh") * up)


def test_gelu_mul_far_from_zero(ops: Backend) -> None:
    gate = torch.tensor([[-1e4, -120.0, -10.0, -5.0, 0.0, 1e-20, 5.0, 10.0, 120.0, 1e4]])
    got = ops.gelu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert_close(got, torch.nn.functional.gelu(gate.double(), approximate="tanh"))
    assert torch.isnan(ops.gelu_mul(torch.tensor([[float("nan"), 1.0]]))).all()


@DTYPES
@pytest.mark.parametrize("width", [1, 16, 37, 1536])
def test_add_leaves_its_inputs_alone(ops: Backend, dtype: torch.dtype, width: int) -> None:
    x, residual = randn(6, width, dtype=dtype), randn(6, width, dtype=dtype, seed=2)
    copies = x.clone(), residual.clone()
    assert torch.equal(ops.add(x, residual), x + residual)
    assert torch.equal(x, copies[0]) and torch.equal(residual, copies[1]), "an input was changed"


@pytest.mark.parametrize("width", [5, 320, 20_011])  # some shares of each row
@pytest.mark.parametrize(("divisor", "cap"), [(1.0, 30.0), (8.0, 0.0), (3.0, 2.0)])
def test_caps_of_scores(ops: Backend, width: int, divisor: float, cap: float) -> None:
    scores = randn(3, width) * 20
    wanted = scores.double() / divisor
    if cap:
        wanted = cap * (wanted / cap).tanh()
    whole = scores.clone()
    ops.cap_scores(whole, divisor, cap)
    assert_close(whole, wanted)
    alone = scores[1:2].clone()
    ops.cap_scores(alone, divisor, cap)
    assert torch.equal(alone, whole[1:2])


def test_silu_mul_far_from_zero(ops: Backend) -> None:
    gate = torch.tensor([[-1e4, -120.0, -88.0, -20.0, 0.0, 20.0, 88.0, 1e4]])
    got = ops.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert_close(got, gate.double() * torch.sigmoid(gate.double()))


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_mul", "gelu_mul"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(ops: Backend, threads: int, name: str) -> None:
    x, residual, weight = randn(80, 590), randn(80, 590, seed=1), randn(590, seed=2)  # no multiple of a vector

    def call(rows: slice) -> torch.Tensor:
        if name == "rms_norm":
            return ops.rms_norm(x[rows].clone(), weight, 1e-5)
        if name == "add_rms_norm":
            return ops.add_rms_norm(x[rows].clone(), residual[rows].clone(), weight, 1e-5)[0]
        return (ops.silu_mul if name == "silu_mul" else ops.gelu_mul)(x[rows].clone())

    whole = call(slice(0, 80))
    for begin in (0, 3, 10):
        for count in ROWS:
            assert torch.equal(call(slice(begin, begin + count)), whole[begin : begin + count]), (begin, count)


def rotary64(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, head_dim] turned by angles [rows, head_dim / 2], as complex numbers."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (7, 1, 10), (3, 3, 64), (6, 2, 80)])
def test_rotate_and_store(ops: Backend, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    rows, block_size, num_blocks = 9, 4, 6
    qkv = randn(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    before = qkv.clone()
    positions = torch.tensor([0, 1, 2, 40, 41, 7, 3, 99, 5])
    slots = torch.tensor([22, 23, 0, -1, 5, 9, 11, -1, 14])
    angles = torch.outer(torch.arange(100, dtype=torch.float64), torch.linspace(1, 0.01, head_dim // 2).double())
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    caches = [torch.full((num_blocks, block_size, kv_heads, head_dim), 77.0, dtype=dtype) for _ in range(2)]
    query = ops.rotate_and_store(qkv, positions, cos_sin, *caches, slots)
    q, k, v = qkv.view(rows, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    assert torch.equal(qkv, before), "the input was changed"
    assert_close(query, rotary64(q, angles[positions]))
    live = slots >= 0
    plain = (by_position(cache, ops.kv_layout, keys=number == 0) for number, cache in enumerate(caches))
    flat_keys, flat_values = (cache.view(-1, kv_heads, head_dim) for cache in plain)
    assert_close(flat_keys[slots[live]], rotary64(k, angles[positions])[live])
    assert torch.equal(flat_values[slots[live]], v[live])
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool)
    untouched[slots[live]] = False
    # slot -1 is a valid index in Python: the last slot must not have been written for it
    assert (flat_keys[untouched] == 77).all() and (flat_values[untouched] == 77).all()


@DTYPES
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), [(2, 16, 4), (1, 10, 3), (3, 64, 16), (2, 80, 32)])
def test_what_is_stored_in_int8_is_the_vector_in_steps_of_its_largest_value(
    ops: Backend, dtype: torch.dtype, kv_heads: int, head_dim: int, block_size: int
) -> None:
    rows, heads = 9, 4
    qkv = randn(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    qkv[3, heads * head_dim :] = 0.0
    qkv[5, -1] = float("nan")  # of the last value
    qkv[6, heads * head_dim] = float("inf")  # of the first key
    positions, slots = torch.arange(rows) * 7, torch.tensor([22, 23, 0, 4, -1, 9, 11, 12, 14])
    angles = torch.outer(torch.arange(100, dtype=torch.float64), torch.linspace(1, 0.01, head_dim // 2).double())
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    caches = [encode(torch.full((24, block_size, kv_heads, head_dim), 77.0), torch.int8) for _ in range(2)]
    caches = [laid_out(cache, ops.kv_layout, keys=number == 0) for number, cache in enumerate(caches)]
    ops.rotate_and_store(qkv, positions, cos_sin, *caches, slots)
    _, k, v = qkv.view(rows, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    want = rotary64(k, angles[positions]), v.double()
    for number, (cache, vectors) in enumerate(zip(caches, want, strict=True)):
        stored = decode(by_position(cache, ops.kv_layout, keys=number == 0).view(-1, kv_heads, head_dim + SCALE_BYTES))
        step = vectors.abs().amax(-1, keepdim=True) / 127
        # half a step; each rounding of the vector, the scale, the quotient or the product is 2⁻²⁴ of up to 127 steps
        for row in (0, 1, 2, 3, 7, 8):
            off = (stored[slots[row]].double() - vectors[row]).abs()
            assert (off <= step[row] * (0.5 + 8 * 127 * 2.0**-24)).all(), (number, row)
        bad = (6, 0) if number == 0 else (5, kv_heads - 1)
        assert not torch.isfinite(stored[slots[bad[0]], bad[1]]).any()
        untouched = torch.ones(len(stored), dtype=torch.bool)
        untouched[slots[slots >= 0]] = False
        assert (stored[untouched] == 77).all()


def test_rotated_bits_do_not_depend_on_the_batch(ops: Backend, threads: int) -> None:
    qkv = randn(300, 8 * 24)
    cos_sin = randn(300, 24)

    def call(begin: int, count: int) -> torch.Tensor:
        caches = [torch.zeros(300, 1, 2, 24) for _ in range(2)]
        at = torch.arange(begin, begin + count)
        query = ops.rotate_and_store(qkv[begin : begin + count].clone(), at, cos_sin, *caches, at)
        keys, values = (by_position(cache, ops.kv_layout, keys=number == 0) for number, cache in enumerate(caches))
        return torch.cat((query, keys[at, 0], values[at, 0]), dim=1)

    whole = call(0, 300)
    for begin, count in ((0, 1), (7, 3), (100, 70), (299, 1)):
        assert torch.equal(call(begin, count), whole[begin : begin + count])


@DTYPES
def test_embedding(ops: Backend, dtype: torch.dtype) -> None:
    table = randn(70, 20, dtype=dtype)
    ids = torch.tensor([3, 0, 69, 3, 64])
    assert torch.equal(ops.embedding(ids, packed(ops, table)), table[ids])
    scaled = (table[ids].double() * 7.75).to(dtype)  # a product of two such numbers is exact in float64
    assert torch.equal(ops.embedding(ids, packed(ops, table), 7.75), scaled)


def test_copy_blocks_reads_every_source_before_it_writes() -> None:
    cache = randn(3, 2, 6, 4, 2, 8)
    before = cache.clone()
    copy_blocks(cache, [(1, 2), (2, 5), (1, 0)])
    assert torch.equal(cache[:, :, [2, 5, 0]], before[:, :, [1, 2, 1]])
    assert torch.equal(cache[:, :, [1, 3, 4]], before[:, :, [1, 3, 4]])


def test_exact_exponential() -> None:
    x = torch.cat((torch.linspace(-87.2, 88.2, 100_003), torch.tensor([0.0, -0.0, 1e-30])))
    got = exact.exp(x)
    assert ((got.double() - x.double().exp()).abs() / x.double().exp()).max() < 2 * 2.0**-23
    assert exact.exp(torch.tensor([-1e9, float("-inf"), -87.4])).tolist() == [0.0, 0.0, 0.0]
    assert torch.isnan(exact.exp(torch.tensor([float("nan")]))).all()
    for begin in (1, 5, 31):  # the same bits at another place
        assert torch.equal(exact.exp(x[begin : begin + 50].clone()), got[begin : begin + 50])


@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (0, 4), (2, 2, 300, 16, 2, 64)])
@DTYPES
def test_memory_in_large_pages_is_memory(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = zeros_in_large_pages(shape, dtype)
    assert (made.shape, made.dtype, made.is_contiguous()) == (shape, dtype, True)
    assert (made == 0).all()
    made.fill_(3.0)
    other = zeros_in_large_pages(shape, dtype)
    assert (other == 0).all() and (made == 3).all()
