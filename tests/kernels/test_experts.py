"""A mixture of experts against float64, whoever else is in the batch, and as a recorded operation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from headrace.kernels.attention import Paging
from headrace.kernels.backend import Backend, choose_backend, open_library
from headrace.kernels.cpu.recorder import Recorder
from headrace.kernels.errors import BuildError
from headrace.kernels.forward import Forward, T, immediately
from headrace.kernels.kv_cache import Placement, one_group
from headrace.kernels.matrix import Matrix
from tests.support.matrices import packed
from tests.support.tolerances import assert_close

HIDDEN, WIDTH, COUNT, TOP = 128, 64, 7, 3
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = randn(COUNT * 2 * WIDTH, HIDDEN, seed=1) * HIDDEN**-0.5
    return gate_up.to(dtype), (randn(COUNT * HIDDEN, WIDTH, seed=2) * WIDTH**-0.5).to(dtype)


def wanted(x: torch.Tensor, scores: torch.Tensor, dtype: torch.dtype, normalised: bool) -> torch.Tensor:
    gate_up, down = (matrix.double().chunk(COUNT) for matrix in weights(dtype))
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for row in range(len(x)):
        chosen = scores[row].float().argsort(descending=True, stable=True)[:TOP]
        by = scores[row, chosen].double() if normalised else scores[row].double()
        for expert in chosen.tolist():
            gate, up = (gate_up[expert] @ x[row].double()).chunk(2)
            weight = (scores[row, expert].double() - by.logsumexp(0)).exp()
            out[row] += weight * (down[expert] @ (gate * gate.sigmoid() * up))
    return out


@DTYPES
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 17, 300])
def test_against_float64(ops: Backend, threads: int, dtype: torch.dtype, normalised: bool, rows: int) -> None:
    x, scores = randn(rows, HIDDEN, dtype=dtype), randn(rows, COUNT, dtype=dtype, seed=3)
    copies = x.clone(), scores.clone()
    gate_up, down = (packed(ops, matrix) for matrix in weights(dtype))
    got = ops.experts(x, scores, gate_up, down, TOP, normalised)
    assert torch.equal(x, copies[0]) and torch.equal(scores, copies[1]), "an input was changed"
    want = wanted(x, scores, dtype, normalised)
    if dtype == torch.float32:
        assert_close(got, want)
    else:  # three results within are rounded as well, each by 2⁻⁹ of numbers that may cancel in the sums
        assert (got - want).abs().max() <= 4 * 2.0**-8 * want.abs().max()


@DTYPES
def test_bits_do_not_depend_on_the_batch(ops: Backend, threads: int, dtype: torch.dtype) -> None:
    x, scores = randn(300, HIDDEN, dtype=dtype), randn(300, COUNT, dtype=dtype, seed=3)
    scores[100:200, 2] += 100  # so that one has more rows than are taken at once, and after it some have none
    gate_up, down = (packed(ops, matrix) for matrix in weights(dtype))
    whole = ops.experts(x, scores, gate_up, down, TOP, True)
    for begin, count in ((0, 1), (7, 3), (90, 120), (299, 1)):
        part = slice(begin, begin + count)
        assert torch.equal(ops.experts(x[part].clone(), scores[part].clone(), gate_up, down, TOP, True), whole[part])


def test_of_equal_scores_the_lower_expert_is_the_better(ops: Backend) -> None:
    x, scores = randn(2, HIDDEN), torch.zeros(2, COUNT)
    gate_up, down = (packed(ops, matrix) for matrix in weights(torch.float32))
    assert_close(ops.experts(x, scores, gate_up, down, TOP, True), wanted(x, scores, torch.float32, True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_alone(ops: Backend, bad: float) -> None:
    x, scores = randn(4, HIDDEN), randn(4, COUNT, seed=3)
    gate_up, down = (packed(ops, matrix) for matrix in weights(torch.float32))
    good = ops.experts(x, scores, gate_up, down, TOP, True)
    for place in (0, COUNT - 1):
        damaged = scores.clone()
        damaged[1, place] = bad
        got = ops.experts(x, damaged, gate_up, down, TOP, True)
        assert not got[1].isfinite().any()
        assert torch.equal(got[[0, 2, 3]], good[[0, 2, 3]])


@dataclass
class Model:
    """Two mixtures one after the other."""

    table: Matrix
    router: Matrix
    gate_up: Matrix
    down: Matrix

    def describe(self, ops: Forward[T]) -> T:
        x = ops.embedding(self.table)
        for _ in range(2):
            x = ops.experts(x, ops.linear(x, self.router, None), self.gate_up, self.down, TOP, True)
        return x


@dataclass(frozen=True)
class Inputs:
    num_rows: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    placements: list[Placement]


@pytest.fixture
def compiled() -> Backend:
    library = open_library()
    if isinstance(library, BuildError):
        pytest.skip(f"no compiled kernels here: {library}")
    return choose_backend("cpu", "cpu", library)


@DTYPES
@pytest.mark.parametrize("compress", [False, True])
def test_recorded(compiled: Backend, threads: int, dtype: torch.dtype, compress: bool) -> None:
    assert compiled.record is not None and compiled.compressed is not None
    gate_up, down = (packed(compiled, matrix) for matrix in weights(dtype))
    table, router = randn(50, HIDDEN, dtype=dtype, seed=4), randn(COUNT, HIDDEN, dtype=dtype, seed=5)
    model = Model(packed(compiled, table), packed(compiled, router), gate_up, down)
    cache, none = one_group(torch.zeros(1, 2, 1, 4, 1, 4, dtype=dtype)), torch.zeros(1, dtype=torch.int32)
    by_hand = immediately(compiled, model.describe, cache, [])
    recorded = model
    if compress:
        smaller = (compiled.compressed(packed(compiled, matrix)) for matrix in weights(dtype))
        recorded = replace(model, **dict(zip(("gate_up", "down"), smaller, strict=True)))
    program = compiled.record(recorded.describe, cache, [], 90, dtype)
    for rows in (90, 1, 33):
        ids = torch.arange(rows) * 7 % 50
        inputs = Inputs(rows, ids, ids, [Placement(ids, Paging(none.view(1, 1), none, none))])
        got = program(inputs, None)().hidden
        assert torch.equal(got, by_hand(inputs, None)().hidden)
        assert got.any()


def test_what_does_not_fit_is_refused(compiled: Backend) -> None:
    gate_up, down = (packed(compiled, matrix) for matrix in weights(torch.float32))
    for x, count, one, other in (
        (randn(2, HIDDEN), COUNT + 1, gate_up, down),
        (randn(2, HIDDEN), COUNT, down, gate_up),
        (randn(2, 48), 1, packed(compiled, randn(128, 48)), packed(compiled, randn(48, 64))),
    ):
        with pytest.raises(TypeError, match="experts between"):
            compiled.experts(x, randn(2, count), one, other, TOP, True)
    recorder = Recorder(torch.float32, one_group(torch.zeros(1, 2, 1, 4, 1, 4)))
    x = recorder.embedding(packed(compiled, randn(50, HIDDEN)))
    with pytest.raises(TypeError, match="experts between"):
        recorder.experts(x, x, gate_up, down, TOP, True)
