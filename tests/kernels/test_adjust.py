"""Penalties, biases and bans of the reference, against plain arithmetic one score at a time."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.adjust import NO_BIAS, Adjustments, adjust

INF = float("inf")


def entries(*each: tuple[int, int, float, float, float]) -> Adjustments:
    """(row, token, factor, subtract, bias) each."""
    row, token, *numbers = zip(*each, strict=True)
    return Adjustments(torch.tensor(row), torch.tensor(token), *(torch.tensor(one) for one in numbers))


def many(count: int, rows: int, vocab: int, seed: int = 0) -> Adjustments:
    """Entries for different scores, every tenth a ban."""
    random = torch.Generator().manual_seed(seed)
    at = torch.randperm(rows * vocab, generator=random)[:count]
    factor, subtract, bias = torch.randn((3, count), generator=random)
    bias[::10] = -INF
    return Adjustments(at // vocab, at % vocab, factor.abs() + 0.1, subtract, bias)


def plain(scores: torch.Tensor, a: Adjustments) -> torch.Tensor:
    """In float64, rounded to float32 after each step; exact where double rounding changes nothing, as for one of these.

    A sum, product or quotient of two float32, taken in float64 and rounded to float32, is the correctly rounded one.
    """
    out = scores.clone()
    for n in range(len(a)):
        x, where = float(scores[a.row[n], a.token[n]]), (int(a.row[n]), int(a.token[n]))
        factor, subtract, bias = (
            nothing if column is None else float(column[n])
            for column, nothing in ((a.factor, 1.0), (a.subtract, 0.0), (a.bias, NO_BIAS))
        )
        for step in (lambda v, f=factor: v / f if v > 0 else v * f, lambda v, s=subtract: v - s,
                     lambda v, b=bias: -INF if b == -INF else v + b):  # fmt: skip
            x = float(torch.tensor(step(x), dtype=torch.float64).float())
        out[where] = x
    return out


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.contiguous().view(torch.int32), want.contiguous().view(torch.int32))


def test_bits_are_those_of_plain_arithmetic() -> None:
    scores = torch.randn((5, 300), generator=torch.Generator().manual_seed(1)) * 8
    a = many(700, 5, 300)
    want = plain(scores, a)
    assert (want != scores).sum() > 690
    adjust(scores, a)
    same_bits(scores, want)


@pytest.mark.parametrize("asked", ["factor", "subtract", "bias"])
def test_what_nobody_asks_for_may_be_left_out(asked: str) -> None:
    full = many(200, 3, 100)
    columns = {name: getattr(full, name) if name == asked else None for name in ("factor", "subtract", "bias")}
    a = Adjustments(full.row, full.token, **columns)
    scores = torch.randn((3, 100), generator=torch.Generator().manual_seed(1)) * 8
    want = plain(scores, a)
    adjust(scores, a)
    same_bits(scores, want)


def test_numbers_that_ask_for_nothing_change_no_bit() -> None:
    scores = torch.tensor([[0.0, -0.0, 3.5, -2.25, 1e-45, 3e38, -INF]])
    before = scores.clone()
    adjust(scores, entries(*((0, token, 1.0, 0.0, NO_BIAS) for token in range(7))))
    same_bits(scores, before)


def test_a_ban_holds_whatever_the_score_has_become() -> None:
    scores = torch.full((1, 4), 3e38)
    adjust(scores, entries((0, 0, 1e-3, 0.0, -INF), (0, 2, 1.0, 0.0, -INF), (0, 3, 1.0, -3e38, 3e38)))
    assert scores.tolist() == [[-INF, float(torch.tensor(3e38)), -INF, INF]]


def test_rows_may_lie_apart_and_what_is_between_them_stays() -> None:
    table = torch.randn((6, 40), generator=torch.Generator().manual_seed(2))
    before, view, a = table.clone(), table[1::2, 3:30], many(30, 3, 27)
    want = plain(view, a)
    adjust(view, a)
    same_bits(view, want)
    table[1::2, 3:30] = before[1::2, 3:30]
    assert torch.equal(table, before)
