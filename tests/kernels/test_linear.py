"""A row of a product has the same bits whatever rows are beside it, once rows are padded as `row_multiple` says."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.embedding import logits
from headrace.kernels.linear import linear, padded_rows, row_multiple
from tests.support.tolerances import assert_close

SMALL = [(224, 672), (240, 77), (256, 1024), (16, 40), (66, 331), (576, 960), (1536, 576)]
LARGE = [(576, 49152), (960, 2501)]


def test_padded_rows() -> None:
    assert [padded_rows(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [4, 4, 4, 8, 8, 12]
    assert [padded_rows(n, 1) for n in (0, 1, 5)] == [1, 1, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SMALL, *LARGE])
def test_rows_are_stable(threads: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, outputs = shape
    random = torch.Generator().manual_seed(0)
    weight = torch.randn((outputs, inputs), generator=random).to(dtype)
    x = torch.randn((96, inputs), generator=random).to(dtype)
    multiple = row_multiple(weight)
    whole = linear(x, weight)
    for count in range(1, 71) if shape in SMALL else (1, 3, 17, 64):
        for begin in (0, 3):
            rows = torch.zeros((padded_rows(count, multiple), inputs), dtype=dtype)
            rows[:count] = x[begin : begin + count]
            assert torch.equal(linear(rows, weight)[:count], whole[begin : begin + count]), (begin, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=random).to(dtype) for s in ((5, 300), (40, 300), (40,)))
    want = x.double() @ weight.double().T
    assert_close(linear(x, weight), want)
    assert_close(linear(x, weight, bias), want + bias.double(), roundings=2)
    scores = logits(x, weight)
    assert scores.dtype == torch.float32
    assert_close(scores.to(dtype), want)
