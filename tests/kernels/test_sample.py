"""Noise and draws: exact words, the right distribution, and no influence from the batch."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.kernels.backend import Backend, open_library
from headrace.kernels.cpu.library import CpuLibrary
from headrace.kernels.philox import philox, token_words
from headrace.kernels.sample import SampleParameters, gumbel, sample

MOST = 0xFFFFFFFF


def parameters(rows: int, **values: float | list[float]) -> SampleParameters:
    """The same value for every row, or a list; by default temperature 1, seed 0 and position 0, 1, 2, …."""
    full: dict[str, float | list[float]] = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "choice": 0, "position":
        list(range(rows)),
    }  # fmt: skip
    full.update(values)
    types = {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32, "top_k": torch.int32}
    made = {
        name: torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=types.get(name, torch.int64))
        for name, value in full.items()
    }
    return SampleParameters(**made)


def pick(p: SampleParameters, rows: list[int]) -> SampleParameters:
    return SampleParameters(*(getattr(p, name)[rows] for name in SampleParameters.__slots__))


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [  # the vectors that Random123, the authors' library, is tested with
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)), ((MOST, MOST), (MOST, MOST, MOST,
        MOST), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)), ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3,
        0x13198A2E, 0x03707344), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)  # fmt: skip
def test_philox_gives_the_published_words(
    key: tuple[int, int], counter: tuple[int, ...], words: tuple[int, ...]
) -> None:
    c0 = torch.tensor([counter[0]], dtype=torch.int64)
    assert tuple(int(w) for w in philox(key, (c0, *counter[1:]))) == words


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, 2**64 - 1])
def test_compiled_words_are_the_references(seed: int) -> None:
    library = open_library()
    if not isinstance(library, CpuLibrary):
        pytest.skip(f"no compiled kernels here: {library}")
    ids = torch.cat((torch.arange(300), torch.tensor([49151, 131_071, 131_072, 2**31 - 1])))
    for choice, position in ((0, 0), (3, 17), (2**31 - 1, 2**31)):
        assert torch.equal(library.token_words(seed, choice, position, ids), token_words(seed, choice, position, ids))


def test_every_argument_changes_the_words() -> None:
    ids = torch.arange(4096)
    base = token_words(5, 1, 9, ids)
    assert len(set(base.tolist())) == 4096
    for other in ((6, 1, 9), (5 + 2**40, 1, 9), (5, 2, 9), (5, 1, 10)):
        assert (token_words(*other, ids) != base).sum() > 4090


def test_noise_is_finite_at_both_ends_of_the_uniform() -> None:
    for word in (0, MOST):
        uniform = (word + 0.5) * 2.0**-32
        assert 0.0 < uniform < 1.0
        assert math.isfinite(-math.log(-math.log1p(-uniform)))
    noise = gumbel(1, 0, 0, torch.arange(200_000))
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.01  # Euler's constant
    assert abs(noise.std().item() - math.pi / math.sqrt(6)) < 0.01


@pytest.mark.parametrize(("position", "token"), [(13, 383_325), (128, 384_563)])
def test_a_uniform_that_rounds_to_one_does_no_harm(ops: Backend, position: int, token: int) -> None:
    # their words are 0xFFFFFFC8 and 0xFFFFFFF4: in float32, u is 1 and its noise would be infinite
    assert int(token_words(0, 0, position, torch.tensor([token]))) >= 0xFFFFFFC0
    scores = torch.full((2, token + 3), float("-inf"))
    scores[:, token] = 2.0
    drawn = ops.sample(scores, parameters(2, position=[position, position], top_k=[0, 1]))
    assert drawn.tolist() == [token, token]
    scores[:, token - 1] = 2.0
    drawn = ops.sample(scores, parameters(2, position=[position, position], top_k=[0, 2]))
    assert drawn.tolist() == [token - 1, token - 1]


def test_frequencies_are_the_softmax(best_ops: Backend) -> None:
    rows, vocab = 4000, 40
    scores = torch.randn((1, vocab), generator=torch.Generator().manual_seed(0)) * 1.5
    scores[0, 7] = float("-inf")
    drawn = best_ops.sample(scores.expand(rows, vocab).contiguous(), parameters(rows, temperature=0.8, seed=42))
    expected = (scores[0] / 0.8).softmax(-1) * rows
    counts = torch.bincount(drawn, minlength=vocab)
    assert counts[7] == 0
    likely = expected > 5
    chi2 = ((counts - expected)[likely] ** 2 / expected[likely]).sum().item()
    degrees = int(likely.sum()) - 1
    assert chi2 < degrees + 4 * math.sqrt(2 * degrees)


def test_greedy_takes_the_lowest_of_equal_ids(ops: Backend) -> None:
    scores = torch.zeros(3, 100)
    scores[0, [40, 17, 99]] = 1.0
    scores[1, 99] = 1.0
    assert ops.sample(scores, parameters(3, temperature=0.0)).tolist() == [17, 99, 0]


def test_greedy_beside_sampled_rows(ops: Backend) -> None:
    scores = torch.randn((4, 50), generator=torch.Generator().manual_seed(0))
    got = ops.sample(scores, parameters(4, temperature=[0.0, 1.0, 0.0, 5.0]))
    assert got[[0, 2]].tolist() == scores[[0, 2]].argmax(-1).tolist()


def support(ops: Backend, scores: torch.Tensor, **values: float) -> set[int]:
    """The ids that come up in many draws at a high temperature."""
    rows = 3000
    return set(ops.sample(scores.expand(rows, -1).contiguous(), parameters(rows, seed=7, **values)).tolist())


@pytest.mark.parametrize("top_k", [1, 2, 5, 39, 40, 1000])
def test_top_k(best_ops: Backend, top_k: int) -> None:
    scores = torch.linspace(0, 1, 40)[torch.randperm(40, generator=torch.Generator().manual_seed(1))].unsqueeze(0)
    assert support(best_ops, scores, top_k=top_k) == set(scores[0].argsort(descending=True)[:top_k].tolist())


def test_top_k_keeps_the_lowest_of_equal_ids(best_ops: Backend) -> None:
    scores = torch.zeros(1, 40)
    scores[0, 30] = 0.1
    assert support(best_ops, scores, top_k=3) == {30, 0, 1}


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 6])
def test_top_p(best_ops: Backend, top_p: float, top_k: int) -> None:
    scores = torch.randn((1, 30), generator=torch.Generator().manual_seed(3))
    order = scores[0].argsort(descending=True)[: top_k or 30]
    probability = scores[0, order].double().softmax(-1)
    kept = [int(i) for i, before in zip(order, probability.cumsum(0) - probability, strict=True) if before < top_p]
    got = support(best_ops, scores, top_p=top_p, top_k=top_k)
    assert got <= set(kept)
    assert {i for i in kept if probability[order.tolist().index(i)] > 0.005} <= got


def test_top_p_of_a_flat_distribution(best_ops: Backend) -> None:
    assert support(best_ops, torch.zeros(1, 40), top_p=0.25) == set(range(10))


@pytest.mark.parametrize("min_p", [0.05, 0.5, 1.0])
def test_min_p(best_ops: Backend, min_p: float) -> None:
    probability = torch.tensor([0.4, 0.3, 0.22, 0.05, 0.019, 0.011])
    kept = {i for i, p in enumerate(probability.tolist()) if p >= 0.4 * min_p - 1e-6}
    assert support(best_ops, probability.log().unsqueeze(0), min_p=min_p) == kept


def test_temperature_comes_before_the_cuts(best_ops: Backend) -> None:
    probability = torch.tensor([0.5, 0.3, 0.15, 0.05])  # at temperature 0.5: 0.25, 0.09, … of a sum of 0.365
    assert support(best_ops, probability.log().unsqueeze(0), temperature=0.5, top_p=0.68) == {0}
    assert support(best_ops, probability.log().unsqueeze(0), temperature=1.0, top_p=0.68) == {0, 1}


def mixed(rows: int, vocab: int) -> tuple[torch.Tensor, SampleParameters]:
    """Rows that ask for different things."""
    random = torch.Generator().manual_seed(5)
    scores = torch.randn((rows, vocab), generator=random) * 3
    pattern: dict[str, list[float]] = {
        "temperature": [0.7, 0.0, 1.0, 1.3, 0.2], "top_k": [0, 0, 40, 7, 0, 0, 1], "top_p": [1.0, 0.9, 1.0, 0.5],
        "min_p": [0.0, 0.0, 0.02], "seed": [11, 2**62, -5], "choice": [0, 1, 2],
    }  # fmt: skip
    values = {name: [items[row % len(items)] for row in range(rows)] for name, items in pattern.items()}
    return scores, parameters(rows, **values)


@pytest.mark.parametrize("vocab", [5, 64, 1000])
def test_the_compiled_draw_is_the_references(vocab: int, threads: int) -> None:
    library = open_library()
    if not isinstance(library, CpuLibrary):
        pytest.skip(f"no compiled kernels here: {library}")
    scores, p = mixed(300, vocab)
    assert library.sample(scores, p).tolist() == sample(scores, p).tolist()


@pytest.mark.parametrize("vocab", [331, 140_000])
def test_a_row_draws_the_same_alone_and_in_any_batch(ops: Backend, threads: int, vocab: int) -> None:
    rows = 40 if vocab == 331 else 6
    scores, p = mixed(rows, vocab)
    whole = ops.sample(scores, p).tolist()
    assert max(whole) < vocab
    for begin in range(0, rows, 3):
        group = list(range(begin, min(begin + 3, rows)))
        assert ops.sample(scores[group], pick(p, group)).tolist() == [whole[row] for row in group]
    order = list(range(rows))[::-1]
    assert ops.sample(scores[order], pick(p, order)).tolist() == whole[::-1]


def test_ids_above_131072_are_drawn(ops: Backend) -> None:
    scores = torch.full((8, 200_000), -50.0)
    scores[:, 150_001] = 0.0
    assert ops.sample(scores, parameters(8)).tolist() == [150_001] * 8


def test_scores_are_left_alone(ops: Backend) -> None:
    scores, p = mixed(20, 100)
    before = scores.clone()
    ops.sample(scores, p)
    assert torch.equal(scores, before)


def test_rows_without_a_finite_score_do_no_harm(ops: Backend) -> None:
    scores = torch.zeros(4, 50)
    scores[0], scores[1] = float("nan"), float("-inf")
    scores[3, 20] = 30.0
    got = ops.sample(scores, parameters(4, top_p=[0.5, 1.0, 1.0, 0.9], top_k=[0, 3, 0, 0])).tolist()
    assert all(0 <= token < 50 for token in got)
    assert got[3] == 20
