"""A row of a product has the same bits whatever rows are beside it, and nearly those of exact arithmetic."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.backend import Backend
from headrace.kernels.embedding import Asked
from headrace.kernels.linear import linear, padded_rows, row_multiple
from headrace.kernels.matrix import PANEL, Matrix, new_matrix, plain_matrix
from tests.support.matrices import as_plain, packed
from tests.support.tolerances import assert_close

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SMALL = [(224, 672), (240, 77), (256, 1024), (16, 40), (66, 331), (576, 960), (1536, 576)]
LARGE = [(576, 49152), (960, 2501)]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_padded_rows() -> None:
    assert [padded_rows(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [4, 4, 4, 8, 8, 12]
    assert [padded_rows(n, 1) for n in (0, 1, 5)] == [1, 1, 5]


@DTYPES
@pytest.mark.parametrize("shape", [*SMALL, *LARGE])
def test_rows_are_stable(ops: Backend, threads: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, outputs = shape
    weight = packed(ops, randn(outputs, inputs, dtype=dtype))
    x = randn(96, inputs, dtype=dtype, seed=1)
    multiple = ops.row_multiple(weight)
    whole = ops.linear(x, weight, None)
    for count in range(1, 71) if shape in SMALL else (1, 3, 17, 64):
        for begin in (0, 3):
            rows = torch.zeros((padded_rows(count, multiple), inputs), dtype=dtype)
            rows[:count] = x[begin : begin + count]
            assert torch.equal(ops.linear(rows, weight, None)[:count], whole[begin : begin + count]), (begin, count)


def test_torch_needs_a_multiple_and_the_panels_do_not(ops: Backend) -> None:
    weight = packed(ops, randn(100, 64))
    assert ops.row_multiple(weight) == (1 if ops.name == "cpu" else row_multiple(weight))


@DTYPES
@pytest.mark.parametrize("inputs", [1, 2, 37, 300])
def test_against_float64(ops: Backend, dtype: torch.dtype, inputs: int) -> None:
    for outputs in (1, 15, 16, 17, 63, 64, 65, 200):
        weight, bias = randn(outputs, inputs, dtype=dtype, seed=1), randn(outputs, dtype=dtype)
        matrix = packed(ops, weight)
        for rows in (1, 2, 3, 4, 5, 6, 7, 13, 100):
            x = randn(rows, inputs, dtype=dtype)
            want = x.double() @ weight.double().T
            assert_close(ops.linear(x, matrix, None), want)
            assert_close(ops.linear(x, matrix, bias), want + bias.double(), roundings=2)
            assert_close(ops.linear(x, matrix, bias, 0.22), (want + bias.double()) * 0.22, roundings=3)


@DTYPES
def test_threads_change_no_bit(ops: Backend, dtype: torch.dtype) -> None:
    matrix, x = packed(ops, randn(200, 300, dtype=dtype)), randn(48, 300, dtype=dtype, seed=1)
    results = []
    before = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(ops.linear(x, matrix, None))
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:] if ops.name == "cpu")


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (63, 20), (64, 21), (65, 300), (130, 6)])
def test_panels_hold_every_value_where_the_rows_were(ops: Backend, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = randn(*shape, dtype=dtype)
    matrix = plain_matrix(weight)
    assert matrix.values.shape[0] % PANEL == 0
    assert not matrix.values[shape[0] :].any()
    made = matrix if ops.pack is None else ops.pack(matrix)
    assert made.values.data_ptr() == matrix.values.data_ptr()
    assert torch.equal(as_plain(made), weight)
    assert (made.inputs, made.outputs, made.num_bytes) == (shape[1], shape[0], weight.nbytes)


def test_a_matrix_in_panels_is_not_read_as_a_plain_one() -> None:
    matrix = new_matrix(3, 4, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="in panels"):
        linear(torch.zeros(1, 4), Matrix(matrix.values, 3, 4, in_panels=True))


@pytest.mark.parametrize("vocab", [5, 64, 100, 1000])
@DTYPES
def test_scores(ops: Backend, threads: int, dtype: torch.dtype, vocab: int) -> None:
    hidden, weight = randn(40, 32, dtype=dtype), randn(vocab, 32, dtype=dtype, seed=1)
    output = packed(ops, weight)
    for rows, num_best in ((1, 0), (1, 1), (7, 0), (7, 1), (7, 7), (30, 0), (30, 1), (30, 7), (30, 30)):
        at = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:rows]
        got, every = ops.score(hidden, Asked(at, output, num_best)), ops.score(hidden, Asked(at, output)).scores
        assert got.scores.dtype == torch.float32
        assert_close(every.to(dtype), hidden[at].double() @ weight.double().T)
        assert torch.equal(got.scores, every[num_best:])
        assert got.best.tolist() == every[:num_best].argmax(1).tolist()
        assert got.finite.tolist() == [True] * rows


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("token", [0, 17, 99])
def test_scores_that_are_not_finite_are_told(ops: Backend, threads: int, bad: float, token: int) -> None:
    hidden, weight = randn(9, 16).abs(), randn(100, 16, seed=1)
    hidden[4] = 0  # 0 · inf is NaN: every row has one
    weight[token] = bad
    got = ops.score(hidden, Asked(torch.arange(9), packed(ops, weight), 5))
    assert got.finite.tolist() == [False] * 9
    hidden[4, 3] = bad
    got = ops.score(hidden, Asked(torch.arange(9), packed(ops, randn(100, 16, seed=1)), 3))
    assert got.finite.tolist() == [True] * 4 + [False] + [True] * 4


def test_of_equal_scores_the_lower_id_is_the_best(ops: Backend, threads: int) -> None:
    weight = torch.zeros(3000, 4)
    weight[[2047, 1024, 65]] = 1.0
    got = ops.score(torch.ones(20, 4), Asked(torch.arange(20), packed(ops, weight), 20))
    assert got.best.tolist() == [65] * 20
    got = ops.score(torch.ones(2, 4), Asked(torch.arange(2), packed(ops, -weight), 2))
    assert got.best.tolist() == [0, 0]
