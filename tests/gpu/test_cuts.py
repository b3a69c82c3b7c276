"""top_k, top_p and min_p on a GPU leave what the reference leaves."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.gpu import sample as sample_module
from headrace.kernels.gpu.packing import NEVER, pack
from tests.support.sampler_checks import check_cuts, check_tokens, found_sets, kept, normal, parameters, pick


@pytest.mark.parametrize("vocab", [1, 7, 1000, 4097])
def test_top_k_keeps_exactly_k(vocab: int) -> None:
    ks = sorted({1, 2, 5, vocab // 2, max(vocab - 1, 1), vocab, vocab + 1})
    check_cuts(normal(len(ks), vocab), parameters(len(ks), top_k=ks, temperature=[1.0, 0.1, 30.0]))


def test_top_k_keeps_the_lower_of_equal_ids() -> None:
    scores = torch.randint(-2, 3, (7, 4200), generator=torch.Generator().manual_seed(1)).float()
    p = parameters(7, top_k=[1, 2, 800, 841, 900, 3000, 4199], temperature=[1.0, 0.3])
    check_cuts(scores, p)
    check_tokens(scores[:3], pick(p, [0, 1, 2]))


def test_scores_that_are_equal_after_the_division_are_equal() -> None:
    scores = torch.arange(300).flip(0).expand(2, -1) * 2.0**-20
    check_cuts(scores.contiguous(), parameters(2, top_k=40, temperature=[1e-38, 3e38]))


@pytest.mark.parametrize("vocab", [1, 7, 1000, 4097])
def test_top_p(vocab: int) -> None:
    ps = [0.0, 1e-9, 0.01, 0.3, 0.5, 0.9, 0.999, 0.999999, 1 - 2.0**-24]
    check_cuts(normal(len(ps), vocab, seed=3), parameters(len(ps), top_p=ps, temperature=[1.0, 3.0, 0.3, 100.0]))


def test_top_p_of_equal_scores_counts_them() -> None:
    p = parameters(6, top_p=[0.25, 0.1, 0.5, 0.975, 0.0, 0.9999])
    sets = found_sets(torch.zeros(6, 40), p)
    assert sets == [kept(torch.zeros(40), p, row) for row in range(6)]
    assert sets[0] == set(range(10))


@pytest.mark.parametrize("vocab", [1, 7, 1000, 4097])
def test_min_p(vocab: int) -> None:
    ps = [0.001, 0.05, 0.3, 1.0, 1 - 2.0**-24, 1e-30]
    check_cuts(normal(len(ps), vocab, seed=4), parameters(len(ps), min_p=ps, temperature=[1.0, 2.0, 1e6]))


def test_the_reach_of_min_p_is_exact() -> None:
    wanted = torch.cat((torch.rand(5000, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 1e-45, 0.0])))
    bits = pack(parameters(5003, min_p=wanted.tolist())).words[:, 3]
    assert bits[-1] == NEVER
    reach, least = bits[:-1].view(torch.float32), wanted[:-1].double()
    assert ((-reach.double()).exp() >= least).all()
    assert ((-torch.nextafter(reach, torch.tensor(torch.inf)).double()).exp() < least).all()


@pytest.mark.parametrize("seed", range(6))
def test_all_cuts_together(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows, vocab = 10, int(torch.randint(2, 60, (), generator=random))
    scores = normal(rows, vocab, seed)
    if seed % 2:
        scores = scores.round()  # many ties

    def draw(*choices: float) -> list[float]:
        return [choices[i] for i in torch.randint(0, len(choices), (rows,), generator=random)]

    p = parameters(
        rows, temperature=draw(0.5, 1.0, 2.0), top_k=draw(0, 1, 2, 3, 5, 10, 30), top_p=draw(1.0, 0.1, 0.4, 0.8, 0.97),
        min_p=draw(0.0, 0.0, 0.02, 0.2, 0.6),
    )  # fmt: skip
    check_cuts(scores, p)
    check_tokens(scores, p)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_a_block_of_which_nothing_is_left_draws_nothing(options: dict[str, float]) -> None:
    """Such a block has no winner, and the first token of it, whose score is high enough to be drawn, must not be it."""
    scores = torch.full((40, 4100), -20.0)
    scores[:, [10, 11, 2048, 4096]] = torch.tensor([1.0, 1.0, 0.5, 0.5])
    check_tokens(scores, parameters(40, **options))
    assert set(sample_module.sample(scores, parameters(40, **options)).tolist()) == {10, 11}


@pytest.mark.parametrize("top_p", [0.0, 1e-60])
def test_a_top_p_of_nothing_leaves_the_best_of_what_top_k_leaves(top_p: float) -> None:
    """1e-60 is above 0, and 0 in float32."""
    scores = normal(4, 300)
    scores[2] = 5.0
    scores[3, 40:50] = 50.0
    p = parameters(4, top_k=[1, 7, 7, 7], top_p=top_p)
    check_cuts(scores, p)
    assert sample_module.sample(scores, p).tolist() == scores.argmax(dim=1).tolist()


def test_nothing_is_launched_for_cuts_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [pack(parameters(3, **one)).cuts for one in ({}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1})]
    assert asked == [False, True, True, True]
    assert not pack(parameters(3, temperature=0.0, top_k=4)).cuts
    monkeypatch.setattr(sample_module, "cut", lambda *_: pytest.fail("launched"))
    sample_module.sample(normal(2, 30), parameters(2))
