"""Draws by Triton's kernels are those of the reference: words, noise, cuts and ties."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from headrace.kernels.gpu import sample as sample_module
from headrace.kernels.gpu.philox import gumbel as gumbel_in_kernel
from headrace.kernels.gpu.philox import token_word
from headrace.kernels.philox import token_words
from headrace.kernels.sample import SampleParameters, gumbel
from headrace.kernels.sample import sample as reference
from tests.support.attention_checks import untouched
from tests.support.sampler_checks import check_tokens, found_sets, normal, parameters, pick

MOST = 0xFFFFFFFF


@triton.jit
def words_kernel(tokens, asked, out, COUNT: tl.constexpr):  # noqa: N803  a constant
    at = tl.arange(0, COUNT)
    choice, position = tl.load(asked + 1).to(tl.int32), tl.load(asked + 2).to(tl.int32)
    word = token_word(tl.load(tokens + at), tl.load(asked), choice, position)
    tl.store(out + at, word.to(tl.int64))


@triton.jit
def noise_kernel(words, out, COUNT: tl.constexpr):  # noqa: N803  a constant
    at = tl.arange(0, COUNT)
    tl.store(out + at, gumbel_in_kernel(tl.load(words + at).to(tl.uint32)))


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1, -1, -(2**62) - 5])
def test_words_are_the_references(seed: int) -> None:
    ids = torch.cat((torch.arange(500), torch.arange(131_064, 131_076)))
    for choice, position in ((0, 0), (3, 17), (2**31 - 1, 2**31 - 2)):
        out = torch.empty(512, dtype=torch.int64)
        words_kernel[(1,)](ids.to(torch.int32), torch.tensor([seed, choice, position]), out, 512)
        assert torch.equal(out, token_words(seed, choice, position, ids))


def noise(words: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(words))
    noise_kernel[(1,)](words, out, len(words))
    return out


def test_noise_is_as_exact_as_it_says_for_words_of_every_size() -> None:
    random = torch.Generator().manual_seed(0)
    shifts = torch.arange(2**17) % 32
    low = torch.randint(0, 2**32, (2**17,), generator=random) >> shifts
    words = torch.cat((low, MOST - low))
    words[:4] = torch.tensor([0, 1, MOST - 1, MOST])
    words[4:2000] = int((1 - math.sqrt(0.5)) * 2**32) + torch.arange(-998, 998)  # where the two ways meet
    want = -torch.log(-torch.log1p(-(words.double() + 0.5) * 2.0**-32))
    got = noise(words)
    assert torch.isfinite(got).all()
    assert ((got.double() - want).abs() <= 2.0**-22 + 2.0**-23 * want.abs()).all()
    assert got[0] == got.max() > 22.8
    assert got[3] == got.min() < -3.1


def test_frequencies_of_many_races_are_the_softmax() -> None:
    rows, vocab = 2**14, 16
    table = noise(token_words(3, 1, 2, torch.arange(rows * vocab))).view(rows, vocab)
    for temperature in (0.3, 1.0, 2.5):
        chances = (normal(1, vocab, seed=9)[0] / temperature).double().softmax(0)
        counts = torch.bincount((chances.log() + table).argmax(1), minlength=vocab).double()
        expected = chances * len(table)
        likely = expected > 5
        chi2 = ((counts - expected)[likely] ** 2 / expected[likely]).sum().item()
        assert chi2 < int(likely.sum()) - 1 + 4 * math.sqrt(2 * int(likely.sum()))


@pytest.mark.parametrize("vocab", [1, 7, 1000, 4097])
def test_tokens_are_the_references(vocab: int) -> None:
    rows = 8 if vocab < 4000 else 5
    check_tokens(normal(rows, vocab), parameters(rows, temperature=[0.7, 1.0, 0.0, 5.0, 0.01], choice=[0, 1, 2]))


def test_equal_scores_are_decided_by_noise_alone_and_tokens_differ() -> None:
    p = parameters(12, temperature=[1.0, 1e6, 0.2])
    scores = torch.full((12, 300), 5.0)
    check_tokens(scores, p)
    assert len(set(reference(scores, p).tolist())) > 8


def test_large_scores_at_a_small_temperature_do_not_lose_the_noise() -> None:
    scores = 1000.0 + torch.arange(4097).expand(4, -1) % 7 * 2.0**-13  # 1.2 apart after the division, of 10⁷
    check_tokens(scores.contiguous(), parameters(4, temperature=1e-4))


def test_ids_above_131072_are_drawn() -> None:
    scores = torch.full((1, 133_001), -90.0)
    scores[0, [131_073, 133_000]] = torch.tensor([1.0, 1.5])
    drawn = [133_000] if float(gumbel(7, 0, 0, torch.tensor([131_073, 133_000])).diff()) > -0.5 else [131_073]
    assert sample_module.sample(scores, parameters(1)).tolist() == drawn
    assert sample_module.sample(scores, parameters(1, temperature=0.0)).tolist() == [133_000]
    assert found_sets(scores, parameters(1, top_k=2)) == [{131_073, 133_000}]


def test_greedy_takes_the_lower_of_equal_ids_in_and_across_blocks() -> None:
    scores = torch.zeros(5, 4097)
    scores[0, [40, 17, 99]] = 1.0
    scores[1, [4096, 2048]] = 1.0
    scores[2, [2047, 2048]] = 1.0
    scores[3] = -0.0
    scores[3, 9:] = 0.0
    scores[4] = -1.0
    scores[4, 4096] = -0.5
    assert sample_module.sample(scores, parameters(5, temperature=0.0)).tolist() == [17, 2048, 2047, 0, 4096]


def test_rows_with_infinite_scores_and_nan_do_as_the_reference() -> None:
    inf, nan = float("inf"), float("nan")
    scores = normal(9, 2100)
    scores[0, ::2] = -inf
    scores[1] = -inf
    scores[2, 100] = nan
    scores[3] = nan
    scores[4, 2099] = inf
    scores[5, :2050] = -inf
    scores[6, [3, 2098]] = torch.tensor([nan, -nan])
    scores[7, [2090, 8]] = inf
    scores[8] = -inf
    scores[8, 2080] = -1e38
    for temperature in (0.0, 1.0):
        p = parameters(9, temperature=temperature)
        assert sample_module.sample(scores, p).tolist() == reference(scores, p).tolist()
    p = parameters(9, top_k=[5, 1], top_p=[0.9, 0.5, 1.0], min_p=[0.0, 0.0, 0.1])
    assert sample_module.sample(scores, p).tolist() == reference(scores, p).tolist()


# (position, token) whose words for seed 0 are next to the ends: in float32, a uniform made of them would be 0 or 1
EXTREMES = [(44_076, 575), (5043, 2787), (3016, 345), (23_825, 1639)]


@pytest.mark.parametrize(("position", "token"), EXTREMES)
def test_a_uniform_next_to_0_or_1_does_no_harm(position: int, token: int) -> None:
    word = int(token_words(0, 0, position, torch.tensor([token])))
    assert min(word, MOST - word) < 64
    scores = torch.full((2, token + 3), float("-inf"))
    scores[:, token] = 2.0
    scores[1, token - 1] = 2.0
    got = sample_module.sample(scores, parameters(2, seed=0, position=position, top_k=[0, 2]))
    assert got.tolist() == [token, token if word < 64 else token - 1]


@pytest.mark.parametrize("options", [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_a_row_draws_the_same_alone_and_in_any_batch(options: dict[str, float]) -> None:
    scores, p = normal(7, 331), parameters(7, temperature=[0.7, 0.0, 1.3], **options)
    whole = sample_module.sample(scores, p)
    mixed = SampleParameters(*(torch.cat((getattr(p, n), getattr(q, n))) for n in SampleParameters.__slots__ for q in
                               [parameters(2, top_k=3, top_p=0.5, min_p=0.01)]))  # fmt: skip
    assert torch.equal(sample_module.sample(torch.cat((scores, scores[:2])), mixed)[:7], whole)
    for rows in ([0], [6, 2]):
        assert torch.equal(sample_module.sample(scores[rows], pick(p, rows)), whole[rows])


def test_rows_beyond_element_2_to_the_31() -> None:
    scores = untouched((3, 2**30), torch.float32)[:, :40]
    scores[:] = normal(3, 40)
    for options in ({"temperature": 0.0}, {}, {"top_k": 3}):
        check_tokens(scores, parameters(3, **options))


def test_scores_may_lie_in_longer_rows_and_are_left_alone() -> None:
    table = normal(6, 400)
    before = table.clone()
    p = parameters(3, top_k=[0, 4, 9])
    got = sample_module.sample(table[::2, 5:336], p)
    assert torch.equal(table, before)
    assert got.tolist() == sample_module.sample(table[::2, 5:336].contiguous(), p).tolist()
    assert sample_module.sample(table[:0], parameters(0)).shape == (0,)
    with pytest.raises(ValueError, match="contiguous"):
        sample_module.sample(table.t(), parameters(400))
