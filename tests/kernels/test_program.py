"""A recorded pass gives the bits that its operations give one by one, in any number of steps, threads and rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from headrace.kernels.attention import Paging
from headrace.kernels.backend import Backend, choose_backend, open_library
from headrace.kernels.cpu.recorder import Recorder, Register
from headrace.kernels.errors import BuildError
from headrace.kernels.forward import Forward, T, immediately
from headrace.kernels.kv_cache import KvCache, Placement, one_group
from headrace.kernels.matrix import Matrix, plain_matrix
from headrace.kernels.rotary import QueryKeyNorm, Rotation
from tests.support.matrices import packed

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BLOCKS, BLOCK_SIZE = 90, 48, 6, 2, 16, 20, 16


@pytest.fixture
def compiled() -> Backend:
    library = open_library()
    if isinstance(library, BuildError):
        pytest.skip(f"no compiled kernels here: {library}")
    return choose_backend("cpu", "cpu", library)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5).to(dtype)


@dataclass
class Model:
    """A decoder of two layers with biases; `middle` decides whether the gate can be part of the product."""

    ops: Backend
    dtype: torch.dtype
    middle: int
    around: bool = False  # norms around the branches, sums without one, scales, sinks, the other gate, all rotations

    def matrix(self, outputs: int, inputs: int, seed: int) -> Matrix:
        return packed(self.ops, randn(outputs, inputs, dtype=self.dtype, seed=seed))

    def __post_init__(self) -> None:
        self.table = self.matrix(VOCAB, HIDDEN, 1)
        self.norm = 1 + randn(HIDDEN, dtype=torch.float32, seed=2)
        self.qkv = [self.matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, 3 + layer) for layer in range(2)]
        self.qkv_bias = randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=self.dtype, seed=5)
        self.out = self.matrix(HIDDEN, HEADS * HEAD_DIM, 6)
        self.gate_up = self.matrix(2 * self.middle, HIDDEN, 7)
        self.gate_up_bias = randn(2 * self.middle, dtype=self.dtype, seed=8)
        self.down = self.matrix(HIDDEN, self.middle, 9)
        each, rows = (
            QueryKeyNorm(1 + randn(heads[0], dtype=torch.float32, seed=10), 1 + randn(heads[1], dtype=torch.float32,
            seed=11), 1e-5) for heads in ((HEAD_DIM, HEAD_DIM), (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM))
        )  # fmt: skip
        self.rotations = (Rotation(1, each), Rotation(None, rows))

    def describe(self, ops: Forward[T]) -> T:
        return self.describe_around(ops) if self.around else self.describe_before(ops)

    def describe_around(self, ops: Forward[T]) -> T:
        x = residual = ops.embedding(self.table, 3.5)
        for layer in range(2):
            query = ops.rotate_and_store(ops.linear(x, self.qkv[layer], self.qkv_bias), layer, self.rotations[layer])
            sinks = randn(HEADS, dtype=torch.float32, seed=12 + layer)  # nobody else keeps them
            seen = ops.paged_attention(query, layer, 0.25, window=5, sinks=sinks)
            branch = ops.rms_norm(ops.linear(seen, self.out, None, 0.3), self.norm, 1e-5)
            x, residual = ops.add_rms_norm(branch, residual, self.norm, 1e-5)
            gated = ops.gelu_mul(ops.linear(x, self.gate_up, self.gate_up_bias))
            x = residual = ops.add(ops.linear(gated, self.down, None, 1.7), residual)
        return x

    def describe_before(self, ops: Forward[T]) -> T:
        residual = ops.embedding(self.table)
        x = ops.rms_norm(residual, self.norm, 1e-5)
        for layer in range(2):
            query = ops.rotate_and_store(ops.linear(x, self.qkv[layer], self.qkv_bias), layer, Rotation())
            seen = ops.paged_attention(query, layer, 0.25, window=5 * layer, soft_cap=3.0 * layer)
            x, residual = ops.add_rms_norm(ops.linear(seen, self.out, None), residual, self.norm, 1e-5)
            gated = ops.silu_mul(ops.linear(x, self.gate_up, self.gate_up_bias))
            x, residual = ops.add_rms_norm(ops.linear(gated, self.down, None), residual, self.norm, 1e-5)
        return x


@dataclass(frozen=True)
class Inputs:
    num_rows: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    placements: list[Placement]


def step(lengths: list[tuple[int, int]]) -> Inputs:
    """A step for sequences of (keys, queries), each with blocks of its own, others in a second group of layers."""
    at = [(s, p) for s, (keys, queries) in enumerate(lengths) for p in range(keys - queries, keys)]
    starts = torch.tensor([0] + [queries for _, queries in lengths]).cumsum(0).int()
    kv_len = torch.tensor([keys for keys, _ in lengths], dtype=torch.int32)
    ids = torch.tensor([(7 * s + 3 * p) % VOCAB for s, p in at])
    placements: list[Placement] = []
    for blocks in (torch.arange(BLOCKS), torch.arange(BLOCKS).flip(0)):
        table = blocks.int().view(len(lengths), -1)
        slots = [int(table[s, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for s, p in at]
        placements.append(Placement(torch.tensor(slots), Paging(table, starts, kv_len)))
    return Inputs(len(at), ids, torch.tensor([p for _, p in at]), placements)


def cache(dtype: torch.dtype, groups: int = 1) -> KvCache:
    sizes = (2, BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    if groups == 1:
        return one_group(torch.zeros(2, *sizes, dtype=dtype))
    # the second has more blocks; the layers come in the other order
    more = (sizes[0], BLOCKS + 3, *sizes[2:])
    return KvCache((torch.zeros(1, *sizes, dtype=dtype), torch.zeros(1, *more, dtype=dtype)), [(1, 0), (0, 0)])


STEPS = (
    [(33, 33), (2, 2), (9, 9), (1, 1)],
    [(34, 1), (3, 1), (10, 1), (2, 1)],
    [(35, 1), (20, 17), (11, 1), (40, 38)],
)


@DTYPES
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize(("middle", "groups"), [(64, 1), (192, 2), (37, 1)])
def test_a_program_gives_the_bits_of_its_operations(
    compiled: Backend,
    threads: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    middle: int,
    groups: int,
    around: bool,
) -> None:
    model = Model(compiled, dtype, middle, around)
    angles = torch.randn(64, HEAD_DIM // 2, generator=torch.Generator().manual_seed(0))
    tables = [torch.cat([angles] * 2, 1), angles]  # of whole heads, and of half of each
    one, other = cache(cache_dtype, groups), cache(cache_dtype, groups)
    assert compiled.record is not None
    program = compiled.record(model.describe, one, tables, 90, dtype)
    by_hand = immediately(compiled, model.describe, other, tables)
    for lengths in STEPS:
        inputs = step(lengths)
        got = program(inputs, None)().hidden
        assert got.shape == (inputs.num_rows, HIDDEN)
        assert torch.equal(got, by_hand(inputs, None)().hidden)
        assert all(map(torch.equal, one.groups, other.groups))
        assert got.isfinite().all() and got.any()


def test_a_gate_of_whole_panels_is_computed_with_its_product(compiled: Backend) -> None:
    kinds = []
    for middle in (64, 37):
        recorder = Recorder(torch.float32, cache(torch.float32), [torch.zeros(64, HEAD_DIM)])
        Model(compiled, torch.float32, middle).describe(recorder)
        kinds.append(len(recorder.operations))
    assert kinds == [18, 20]


def test_buffers_are_used_again(compiled: Backend) -> None:
    model = Model(compiled, torch.float32, 64)
    assert compiled.record is not None
    program = compiled.record(model.describe, cache(torch.float32), [torch.zeros(64, HEAD_DIM)], 7, torch.float32)
    places = {operation.out for operation in program._operations}
    assert len(places) < len(program._operations) / 2


def test_more_rows_than_buffers_are_refused(compiled: Backend) -> None:
    model = Model(compiled, torch.float32, 64)
    assert compiled.record is not None
    program = compiled.record(model.describe, cache(torch.float32), [torch.zeros(64, HEAD_DIM)], 44, torch.float32)
    program(step([(41, 40), (2, 2), (1, 1), (1, 1)]), None)()
    with pytest.raises(ValueError, match="45 rows"):
        program(step([(41, 41), (2, 2), (1, 1), (1, 1)]), None)


def test_what_a_program_cannot_point_to_is_refused(compiled: Backend) -> None:
    recorder = Recorder(torch.float32, cache(torch.float32))
    weight = randn(8, 4, dtype=torch.float32, seed=0)
    with pytest.raises(TypeError, match="in panels"):
        recorder.embedding(plain_matrix(weight))
    x = recorder.embedding(packed(compiled, weight))
    with pytest.raises(TypeError, match="in panels"):
        recorder.linear(x, packed(compiled, weight.bfloat16()), None)
    with pytest.raises(ValueError, match="4 values a row"):
        recorder.linear(x, packed(compiled, randn(4, 6, dtype=torch.float32, seed=0)), None)
    norm = QueryKeyNorm(torch.ones(3), torch.ones(3), 1e-5)
    with pytest.raises(TypeError, match="a head's 16"):
        recorder.rotate_and_store(Register(10 * HEAD_DIM, 0), 0, Rotation(None, norm))
    with pytest.raises(TypeError, match="expected 4"):
        recorder.rms_norm(x, torch.ones(5), 1e-5)
