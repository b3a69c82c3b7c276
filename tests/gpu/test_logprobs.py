"""Log-probabilities by Triton's kernels, against float64, and the ids of the best against the reference."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from headrace.kernels.gpu import logprobs as logprobs_module
from headrace.kernels.logprobs import Pairs, pairs
from headrace.kernels.logprobs import logprobs as reference
from tests.support.attention_checks import untouched
from tests.support.mutations import Fault, assert_found

INF = float("inf")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities that are meant


def within(got: float, want: float) -> bool:
    """As derived in kernels/gpu/logprobs.py."""
    return got == want if math.isinf(want) else abs(got - want) <= 2.0**-17 + 2.0**-23 * abs(want)


def normal(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 4


def found(
    scores: torch.Tensor, rows: list[int], counts: list[int], chosen: int = 0, module: ModuleType = logprobs_module
) -> list[tuple[float, Pairs]]:
    tokens = (torch.arange(len(scores)) + chosen) % scores.shape[1]
    return pairs(module.logprobs(scores, rows, tokens, counts), counts)


def check(
    scores: torch.Tensor, rows: list[int], counts: list[int], chosen: int = 0, module: ModuleType = logprobs_module
) -> None:
    """All values within the tolerance, all ids the reference's."""
    tokens = (torch.arange(len(scores)) + chosen) % scores.shape[1]
    plain = pairs(reference(scores, rows, tokens, counts), counts)
    got = found(scores, rows, counts, chosen, module)
    for row, (own, best), (_, wanted) in zip(rows, got, plain, strict=True):
        want = scores[row].double().log_softmax(0)
        assert within(own, float(want[tokens[row]])), (own, float(want[tokens[row]]))
        assert [token for token, _ in best] == [token for token, _ in wanted]
        assert all(within(value, float(want[token])) for token, value in best)


@pytest.mark.parametrize("vocab", [1, 2, 7, 1000, 4096, 4097, 9000])
def test_values_and_order(vocab: int) -> None:
    check(normal(4, vocab), [0, 1, 3], [3, 0, 20])
    check(normal(2, vocab), [0, 1], [1, 2], chosen=vocab - 1)


@pytest.mark.parametrize("spread", [1e-3, 0.0, 30.0, 1e4])
def test_flat_and_steep_distributions_far_from_zero(spread: float) -> None:
    check(normal(2, 9000) * spread + 500.0, [0, 1], [5, 2])
    check(normal(2, 9000) * spread - 500.0, [0, 1], [5, 2])


def test_a_large_vocabulary_with_the_best_above_131072() -> None:
    scores = normal(1, 152_000)
    scores[0, [131_073, 151_999]] = torch.tensor([21.0, 22.0])
    check(scores, [0], [3], chosen=151_999)
    assert [token for token, _ in found(scores, [0], [2])[0][1]] == [151_999, 131_073]
    check(torch.zeros(1, 152_000), [0], [2], chosen=140_000)  # where the sum is longest


def test_more_asked_for_than_a_block_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "BLOCK", 16)
    check(normal(2, 100), [0, 1], [100, 40])
    check(normal(1, 70).round(), [0], [90])
    scores = torch.full((1, 67), -INF)
    scores[0, 40] = 1.0
    check(scores, [0], [67])


def test_equal_scores_in_order_of_their_ids_also_where_the_list_ends() -> None:
    scores = torch.randint(0, 4, (6, 4200), generator=torch.Generator().manual_seed(3)).float()
    scores[5, :4090] = -1.0
    check(scores, list(range(6)), [1, 2, 20, 0, 33, 50])
    check(torch.zeros(1, 9000), [0], [5])


def test_infinitely_small_scores() -> None:
    scores = normal(3, 9000)
    scores[0, :4096] = -INF
    scores[1, 4:] = -INF
    scores[2, 4096:8192] = -INF
    check(scores, [0, 1, 2], [3, 6, 3])
    check(scores, [0, 1, 2], [0, 0, 0], chosen=5000)


def test_rows_that_have_no_distribution_give_nan_and_disturb_nobody() -> None:
    scores = normal(4, 4200)
    scores[0], scores[1, 4], scores[2, 4150] = -INF, float("nan"), INF
    rows = found(scores, [0, 1, 2, 3], [2] * 4)
    for own, best in rows[:3]:
        assert math.isnan(own) and all(math.isnan(value) and 0 <= token < 4200 for token, value in best)
    assert rows[3:] == found(scores, [3], [2])


def test_a_row_has_the_same_bits_beside_others_and_whatever_they_ask() -> None:
    scores = normal(5, 9000)
    alone = [found(scores, [row], [3])[0] for row in range(5)]
    for counts in ([3] * 5, [3, 20, 0, 1, 3], [0, 3, 17, 64, 1]):
        for row, count, (own, best) in zip(range(5), counts, found(scores, list(range(5)), counts), strict=True):
            assert own == alone[row][0]
            assert best[:3] == alone[row][1][: min(count, 3)]
    assert found(scores, [4, 1], [3, 3]) == [alone[4], alone[1]]


def test_rows_may_lie_apart_and_are_left_alone() -> None:
    table = normal(6, 400)
    before = table.clone()
    check(table[::2, 5:336], [0, 2], [4, 1])
    assert torch.equal(table, before)
    assert logprobs_module.logprobs(table, [], torch.zeros(6, dtype=torch.int64), []).shape == (0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        logprobs_module.logprobs(table.t(), [0], torch.zeros(400, dtype=torch.int64), [1])


def check_far_rows(logprobs: ModuleType) -> None:
    """A prompt's rows are many: 8,192 of 262,144 tokens end at element number 2³¹ of the scores."""
    scores = untouched((3, 2**30), torch.float32)[:, :40]
    scores[2] = normal(1, 40)[0]
    check(scores, [2], [4], module=logprobs)


def test_rows_beyond_element_2_to_the_31() -> None:
    check_far_rows(logprobs_module)


def check_everything(logprobs: ModuleType) -> None:
    """Small checks that see each of the faults below."""
    scores = normal(3, 4400)
    scores[0, :4097] = -INF
    check(scores[:, 1:], [0, 2], [3, 7], 4300, logprobs)
    check(torch.full((1, 4097), -80.0), [0], [2], 0, logprobs)
    check(normal(2, 4097), [1], [0], 4094, logprobs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "BLOCK", 16)
        check(normal(1, 70).round(), [0], [70], 0, logprobs)
    check_far_rows(logprobs)


FAULTS = [
    Fault("logprobs", "mask=token < VOCAB, other", "mask=token <= VOCAB, other"),
    Fault("logprobs", "mask=token < VOCAB, other", "mask=token < VOCAB - 1, other"),
    Fault("logprobs", 'tl.where(top == float("-inf"), 0.0, top)', "top"),
    Fault("logprobs", "left = tl.where(left == first, NOTHING, left)", "left = left"),
    Fault("logprobs", "range(0, tl.minimum(k, BLOCK))", "range(0, tl.minimum(k, 6))"),
    Fault("logprobs", "tl.exp(tops - top)", "tl.exp(tops)"),
    Fault("logprobs", "natural_log(total)", "natural_log(total + 1.0)"),
    Fault("logprobs", "tl.load(chosen + row)", "tl.load(chosen + at)"),
    Fault("logprobs", "(own - top - log_total)", "(own - log_total)"),
    Fault("logprobs", "scores + row * STRIDE + token", "scores + at * STRIDE + token"),
    Fault("logprobs", "tl.load(asked + 2 * at).to(tl.int64)", "tl.load(asked + 2 * at)", times=2),
    Fault("logprobs", "taken += mine.to(tl.int32)", "taken += 1"),
    Fault("logprobs", "(taken < tl.minimum(k, BLOCK))", "(taken < tl.minimum(k, BLOCK) - 1)"),
    Fault("logprobs", "found + 1 + width + nth", "found + width + nth"),
    Fault("order", " ^ LARGEST_ID", "", times=2),  # the higher id of equal ones
    Fault("philox", "k * 0.693359375 +", "k * 0.69335 +"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_fault_is_found(fault: Fault) -> None:
    assert_found(fault, check_everything, "logprobs")


def test_what_finds_the_faults_finds_none_in_the_kernels() -> None:
    check_everything(logprobs_module)
