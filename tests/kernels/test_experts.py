"""A mixture of experts against float64, whoever else is in the batch, and as a recorded operation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from headrace.kernels.attention import Paging
from headrace.kernels.backend import Backend, choose_backend, open_library
from headrace.kernels.cpu.recorder import Recorder
from headrace.kernels.errors import BuildError
from headrace.kernels.experts import Mixture
from headrace.kernels.forward import Forward, T, immediately
from headrace.kernels.gated import Clamp
from headrace.kernels.kv_cache import Placement, one_group
from headrace.kernels.matrix import Matrix
from tests.support.matrices import packed
from tests.support.tolerances import assert_close

HIDDEN, WIDTH, COUNT, TOP = 128, 64, 7, 3
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
CLAMP = Clamp(1.702, 1.25)
KINDS = pytest.mark.parametrize("clamp", [None, CLAMP], ids=["plain", "biased and clamped"])


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = randn(COUNT * 2 * WIDTH, HIDDEN, seed=1) * HIDDEN**-0.5
    return gate_up.to(dtype), (randn(COUNT * HIDDEN, WIDTH, seed=2) * WIDTH**-0.5).to(dtype)


def biases(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(COUNT * 2 * WIDTH, dtype=dtype, seed=6), randn(COUNT * HIDDEN, dtype=dtype, seed=7)


def mixture(ops: Backend, dtype: torch.dtype, clamp: Clamp | None = None, normalised: bool = True) -> Mixture:
    gate_up, down = (packed(ops, matrix) for matrix in weights(dtype))
    vectors = (None, None) if clamp is None else biases(dtype)
    return Mixture(gate_up, down, TOP, normalised, *vectors, clamp)


def one_expert(x: torch.Tensor, expert: int, dtype: torch.dtype, clamp: Clamp | None) -> torch.Tensor:
    """What an expert makes of each row, in float64."""
    gate_up, down = (matrix.double().chunk(COUNT)[expert] for matrix in weights(dtype))
    if clamp is None:
        gate, up = (x @ gate_up.T).chunk(2, dim=1)
        return (gate * gate.sigmoid() * up) @ down.T
    gate_up_bias, down_bias = (vector.double().chunk(COUNT)[expert] for vector in biases(dtype))
    gate, up = (x @ gate_up.T + gate_up_bias).chunk(2, dim=1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (gate * (clamp.alpha * gate).sigmoid() * (up + 1)) @ down.T + down_bias


def wanted(
    x: torch.Tensor, scores: torch.Tensor, dtype: torch.dtype, normalised: bool, clamp: Clamp | None = None
) -> torch.Tensor:
    of_all = torch.stack([one_expert(x.double(), expert, dtype, clamp) for expert in range(COUNT)], dim=1)
    chosen = scores.float().argsort(dim=1, descending=True, stable=True)[:, :TOP]
    best = scores.double().gather(1, chosen)
    by = best if normalised else scores.double()
    weights_of_best = (best - by.logsumexp(1, keepdim=True)).exp()
    return (of_all.gather(1, chosen.unsqueeze(2).expand(-1, -1, HIDDEN)) * weights_of_best.unsqueeze(2)).sum(1)


@DTYPES
@KINDS
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 17, 300])
def test_against_float64(
    ops: Backend, threads: int, dtype: torch.dtype, normalised: bool, rows: int, clamp: Clamp | None
) -> None:
    x, scores = randn(rows, HIDDEN, dtype=dtype), randn(rows, COUNT, dtype=dtype, seed=3)
    copies = x.clone(), scores.clone()
    got = ops.experts(x, scores, mixture(ops, dtype, clamp, normalised))
    assert torch.equal(x, copies[0]) and torch.equal(scores, copies[1]), "an input was changed"
    want = wanted(x, scores, dtype, normalised, clamp)
    if dtype == torch.float32:
        assert_close(got, want)
    else:  # three results within are rounded as well, each by 2⁻⁹ of numbers that may cancel in the sums
        assert (got - want).abs().max() <= 4 * 2.0**-8 * want.abs().max()


@DTYPES
@KINDS
def test_bits_do_not_depend_on_the_batch(ops: Backend, threads: int, dtype: torch.dtype, clamp: Clamp | None) -> None:
    x, scores = randn(300, HIDDEN, dtype=dtype), randn(300, COUNT, dtype=dtype, seed=3)
    scores[100:200, 2] += 100  # so that one has more rows than are taken at once, and after it some have none
    made = mixture(ops, dtype, clamp)
    whole = ops.experts(x, scores, made)
    for begin, count in ((0, 1), (7, 3), (90, 120), (299, 1)):
        part = slice(begin, begin + count)
        assert torch.equal(ops.experts(x[part].clone(), scores[part].clone(), made), whole[part])


def test_of_equal_scores_the_lower_expert_is_the_better(ops: Backend) -> None:
    x, scores = randn(2, HIDDEN), torch.zeros(2, COUNT)
    got = ops.experts(x, scores, mixture(ops, torch.float32))
    assert_close(got, wanted(x, scores, torch.float32, True))


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_alone(ops: Backend, bad: float, clamp: Clamp | None) -> None:
    x, scores = randn(4, HIDDEN), randn(4, COUNT, seed=3)
    made = mixture(ops, torch.float32, clamp)
    good = ops.experts(x, scores, made)
    for place in (0, COUNT - 1):
        damaged = scores.clone()
        damaged[1, place] = bad
        got = ops.experts(x, damaged, made)
        assert not got[1].isfinite().any()
        assert torch.equal(got[[0, 2, 3]], good[[0, 2, 3]])


def test_what_is_no_number_comes_through_the_clamp(ops: Backend) -> None:
    x = randn(2, HIDDEN)
    x[1, 5] = float("nan")
    got = ops.experts(x, randn(2, COUNT, seed=3), mixture(ops, torch.float32, CLAMP))
    assert got[0].isfinite().all() and got[1].isnan().all()


@dataclass
class Model:
    """Two mixtures one after the other."""

    table: Matrix
    router: Matrix
    mixture: Mixture

    def describe(self, ops: Forward[T]) -> T:
        x = ops.embedding(self.table)
        for _ in range(2):
            x = ops.experts(x, ops.linear(x, self.router, None), self.mixture)
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
@KINDS
@pytest.mark.parametrize("compress", [False, True])
def test_recorded(compiled: Backend, threads: int, dtype: torch.dtype, compress: bool, clamp: Clamp | None) -> None:
    assert compiled.record is not None and compiled.compressed is not None
    table, router = randn(50, HIDDEN, dtype=dtype, seed=4), randn(COUNT, HIDDEN, dtype=dtype, seed=5)
    model = Model(packed(compiled, table), packed(compiled, router), mixture(compiled, dtype, clamp))
    cache, none = one_group(torch.zeros(1, 2, 1, 4, 1, 4, dtype=dtype)), torch.zeros(1, dtype=torch.int32)
    by_hand = immediately(compiled, model.describe, cache, [])
    recorded = model
    if compress:
        smaller = (compiled.compressed(packed(compiled, matrix)) for matrix in weights(dtype))
        smaller = dict(zip(("gate_up", "down"), smaller, strict=True))
        recorded = replace(model, mixture=replace(model.mixture, **smaller))
    program = compiled.record(recorded.describe, cache, [], 90, dtype)
    for rows in (90, 1, 33):
        ids = torch.arange(rows) * 7 % 50
        inputs = Inputs(rows, ids, ids, [Placement(ids, Paging(none.view(1, 1), none, none))])
        got = program(inputs, None)().hidden
        assert torch.equal(got, by_hand(inputs, None)().hidden)
        assert got.any()


def test_what_does_not_fit_is_refused(compiled: Backend) -> None:
    good = mixture(compiled, torch.float32, CLAMP)
    for x, count, made, words in (
        (randn(2, HIDDEN), COUNT + 1, good, "experts between"),
        (randn(2, HIDDEN), COUNT, replace(good, gate_up=good.down, down=good.gate_up), "experts between"),
        (randn(2, 48), 1, replace(good, gate_up=packed(compiled, randn(128, 48)), down=packed(compiled, randn(48, 64))),
         "experts between"),
        (randn(2, HIDDEN), COUNT, replace(good, down_bias=good.down_bias[:64]), "expected biases of"),
        (randn(2, HIDDEN), COUNT, replace(good, gate_up_bias=good.gate_up_bias.bfloat16()), "contiguous torch.float32"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=words):
            compiled.experts(x, randn(2, count), made)
    recorder = Recorder(torch.float32, one_group(torch.zeros(1, 2, 1, 4, 1, 4)))
    x = recorder.embedding(packed(compiled, randn(50, HIDDEN)))
    with pytest.raises(TypeError, match="experts between"):
        recorder.experts(x, x, good)
