"""Log-probabilities of the reference, against float64, and which of equal scores are given.

Tolerance: torch adds up n weights in float32, each partial sum rounded to 2⁻²⁴ of itself, the sum of a row split among
at least 8 lanes; with a weight's own 2⁻²², log of a sum that is off by n / 8 · 2⁻²⁴ + 2⁻²² is off by as much, and two
subtractions round to 2⁻²⁴ of what is below 2 · |result| + log(n).
"""

from __future__ import annotations

import math

import pytest
import torch

from headrace.kernels.logprobs import logprobs, pairs

INF = float("inf")


def within(got: float, want: float, vocab: int) -> bool:
    if math.isinf(want):
        return got == want
    return abs(got - want) <= 2.0**-24 * (vocab / 8 + 4 + 2 * math.log(vocab) + 4 * abs(want))


def best_ids(row: torch.Tensor, count: int) -> list[int]:
    """By score, and by id where scores are equal."""
    return sorted(range(len(row)), key=lambda token: (-float(row[token]), token))[:count]


def check(scores: torch.Tensor, rows: list[int], chosen: torch.Tensor, counts: list[int]) -> None:
    found = pairs(logprobs(scores, rows, chosen, counts), counts)
    assert len(found) == len(rows)
    for row, count, (own, best) in zip(rows, counts, found, strict=True):
        want = scores[row].double().log_softmax(0)
        vocab = len(want)
        assert within(own, float(want[chosen[row]]), vocab)
        assert [token for token, _ in best] == best_ids(scores[row], count)
        assert all(within(value, float(want[token]), vocab) for token, value in best)


def normal(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("vocab", [1, 2, 7, 1000, 20_000])
def test_values_and_order(vocab: int) -> None:
    chosen = torch.arange(5) * 7 % vocab
    check(normal(5, vocab), [0, 1, 2, 4], chosen, [3, 0, 20, 1])
    check(normal(5, vocab), list(range(5)), chosen, [2] * 5)


def test_more_rows_than_are_computed_together() -> None:
    chosen = torch.arange(80) % 30
    check(normal(80, 30), list(range(80)), chosen, [at % 4 for at in range(80)])
    check(normal(80, 30), [at for at in range(80) if at % 5], chosen, [at % 3 for at in range(64)])


def test_equal_scores_in_order_of_their_ids_also_where_the_list_ends() -> None:
    scores = torch.randint(0, 4, (6, 500), generator=torch.Generator().manual_seed(3)).float()
    check(scores, list(range(6)), torch.arange(6), [1, 2, 100, 130, 499, 600])
    scores[:, ::2] = -INF
    check(scores, list(range(6)), torch.arange(6), [1, 5, 249, 250, 251, 300])
    check(torch.zeros(2, 40), [0, 1], torch.tensor([3, 39]), [5, 39])


def test_scores_that_differ_by_less_than_log_probabilities_can_tell_are_in_their_order() -> None:
    scores = torch.zeros(1, 1000)
    scores[0, 700:705] = torch.arange(5) * 2.0**-24  # of log-probabilities near -6.9 the last bit is 2⁻²²
    found = pairs(logprobs(scores, [0], torch.tensor([0]), [5]), [5])
    assert [token for token, _ in found[0][1]] == [704, 703, 702, 701, 0]


def test_rows_that_have_no_distribution_give_nan_and_disturb_nobody() -> None:
    scores = normal(4, 30)
    scores[0], scores[1, 4], scores[2, 5] = -INF, float("nan"), INF
    found = pairs(logprobs(scores, [0, 1, 2, 3], torch.tensor([1, 1, 1, 1]), [2] * 4), [2] * 4)
    for own, best in found[:3]:
        assert math.isnan(own) and all(math.isnan(value) and 0 <= token < 30 for token, value in best)
    assert found[3:] == pairs(logprobs(scores, [3], torch.tensor([1] * 4), [2]), [2])
