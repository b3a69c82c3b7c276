"""Penalties, biases and bans by Triton's kernel have the bits of the reference."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from headrace.kernels.adjust import NO_BIAS, Adjustments
from headrace.kernels.adjust import adjust as reference
from headrace.kernels.gpu import adjust as adjust_module
from tests.support.attention_checks import untouched
from tests.support.mutations import Fault, assert_found

INF = float("inf")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities that are meant


def many(count: int, rows: int, vocab: int, seed: int = 0) -> Adjustments:
    """Entries for different scores, every tenth a ban."""
    random = torch.Generator().manual_seed(seed)
    at = torch.randperm(rows * vocab, generator=random)[:count]
    factor, subtract, bias = torch.randn((3, count), generator=random)
    bias[::10] = -INF
    return Adjustments(at // vocab, at % vocab, factor.abs() + 0.1, subtract, bias)


def normal(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 8


def check(scores: torch.Tensor, a: Adjustments, module: ModuleType = adjust_module) -> None:
    want = scores.clone()
    reference(want, a)
    module.adjust(scores, a)
    assert torch.equal(scores.contiguous().view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 1500])
def test_bits_for_any_number_of_entries(count: int) -> None:
    check(normal(5, 331), many(count, 5, 331))


@pytest.mark.parametrize("asked", ["factor", "subtract", "bias"])
def test_what_nobody_asks_for_may_be_left_out(asked: str) -> None:
    full = many(200, 3, 100)
    columns = {name: getattr(full, name) if name == asked else None for name in ("factor", "subtract", "bias")}
    check(normal(3, 100), Adjustments(full.row, full.token, **columns))


def test_numbers_that_ask_for_nothing_change_no_bit() -> None:
    scores = torch.tensor([[0.0, -0.0, 3.5, -2.25, 1e-45, 3e38, -INF]])
    before = scores.clone()
    neutral = (torch.ones(7), torch.zeros(7), torch.full((7,), NO_BIAS))
    check(scores, Adjustments(torch.zeros(7, dtype=torch.int64), torch.arange(7), *neutral))
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32))


def test_a_ban_holds_whatever_the_score_has_become() -> None:
    scores = torch.full((1, 2), 3e38)
    entry = (torch.full((2,), 1e-3), torch.zeros(2), torch.full((2,), -INF))
    check(scores, Adjustments(torch.zeros(2, dtype=torch.int64), torch.arange(2), *entry))
    assert scores.tolist() == [[-INF, -INF]]


def test_rows_may_lie_apart_and_addresses_may_be_odd() -> None:
    table = normal(6, 40)
    before = table.clone()
    check(table[1::2, 3:30], many(30, 3, 27))
    table[1::2, 3:30] = before[1::2, 3:30]
    assert torch.equal(table, before)
    with pytest.raises(ValueError, match="contiguous"):
        adjust_module.adjust(table.t(), many(3, 40, 6))


def test_ids_above_131072() -> None:
    a = Adjustments(torch.tensor([1, 1]), torch.tensor([131_073, 151_935]), None, torch.tensor([1.0, 2.0]), None)
    check(normal(2, 151_936), a)


def test_nothing_is_launched_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def __getitem__(self, grid: object) -> object:
            return pytest.fail("launched")

    monkeypatch.setattr(adjust_module, "adjust_kernel", Never())
    adjust_module.adjust(normal(2, 30), many(0, 2, 30))
    with pytest.raises(pytest.fail.Exception):
        adjust_module.adjust(normal(2, 30), many(1, 2, 30))


def check_everything(adjust: ModuleType) -> None:
    """Small checks that see each of the faults below."""
    check(normal(4, 200)[:, 1:190], many(513, 4, 189), adjust)
    scores = torch.full((1, 2), 3e38)
    entry = (torch.full((2,), 1e-3), torch.zeros(2), torch.full((2,), -INF))
    check(scores, Adjustments(torch.zeros(2, dtype=torch.int64), torch.arange(2), *entry), adjust)
    zero = Adjustments(torch.tensor([0, 0]), torch.tensor([0, 1]), None, torch.zeros(2), None)
    check(torch.tensor([[-0.0, 1.0]]), zero, adjust)
    far = untouched((3, 2**30), torch.float32)[:, :40]
    far[2] = normal(1, 40)[0]
    want, entries = far[2].clone(), many(30, 1, 40)
    reference(want[None], entries)
    adjust.adjust(far, replace(entries, row=entries.row + 2))  # row 2 begins at element number 2³¹
    assert torch.equal(far[2].view(torch.int32), want.view(torch.int32))


FAULTS = [
    Fault("adjust", "mask = entry < entries", "mask = entry <= entries"),
    Fault("adjust", "mask = entry < entries", "mask = entry < entries - 1"),
    Fault("adjust", "tl.program_id(0).to(tl.int64) * ENTRIES", "tl.program_id(0).to(tl.int64) * (ENTRIES - 1)"),
    Fault("adjust", "scores += row * STRIDE + token", "scores += row * (STRIDE - 1) + token"),
    Fault("adjust", "mask=mask, other=0).to(tl.int64), tl.load", "mask=mask, other=0), tl.load"),
    Fault("adjust", "x > 0.0, tl.div_rn", "x < 0.0, tl.div_rn"),
    Fault("adjust", "tl.div_rn(x, tl.where(mask, factor, 1.0))", "x * (1.0 / tl.where(mask, factor, 1.0))"),
    Fault("adjust", "x * factor) - subtract", "x * factor) + subtract"),
    Fault("adjust", "x * factor) - subtract", "(x - subtract) * factor)"),
    Fault("adjust", 'tl.where(bias == float("-inf"), bias, x + bias)', "x + bias"),
    Fault("adjust", "(a.bias, NO_BIAS)", "(a.bias, 0.0)"),
    Fault("adjust", "(a.factor, 1.0)", "(a.factor, 0.5)"),
    Fault("adjust", "stride = scores.stride(0) if", "stride = scores.shape[1] if"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_fault_is_found(fault: Fault) -> None:
    assert_found(fault, check_everything, "adjust")


def test_what_finds_the_faults_finds_none_in_the_kernel() -> None:
    check_everything(adjust_module)
