"""Every sampling option does what it says, and only to its own row."""

from __future__ import annotations

import pytest
import torch

from headrace.engine.adjustments import adjustments
from headrace.engine.intake import Limits, sequences_of
from headrace.engine.runner import PROMPT_LOGPROB_ROWS
from headrace.engine.sampler import Sampler
from headrace.engine.sequence import Sequence
from headrace.engine.types import Request, SamplingOptions
from headrace.kernels.adjust import adjust
from tests.support.checkpoints import Shape, reference_model
from tests.support.torch_rig import backend, prompt, rig

VOCAB = 60
LIMITS = Limits(VOCAB, frozenset({1, 2}), 1000, 1000, 16)


def sequence(output: tuple[int, ...] = (), request_prompt: tuple[int, ...] = (5, 6, 7), **options: object) -> Sequence:
    """A sequence that has sampled `output` already."""
    made = SamplingOptions(**{"temperature": 0.0, "max_tokens": 100, **options})  # type: ignore[arg-type]
    one = sequences_of(Request("a", request_prompt, made), LIMITS, 0)[0]
    one.token_ids += output
    return one


def scores(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(one: Sequence) -> torch.Tensor:
    table = scores()
    adjust(table, adjustments([one], [0], VOCAB))
    return table[0]


OPTIONS: list[tuple[str, dict[str, object]]] = [
    ("repetition_penalty", {"repetition_penalty": 1.5}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("frequency_penalty", {"frequency_penalty": -0.5}),
    ("logit_bias", {"logit_bias": {9: 4.0}}),
    ("min_tokens", {"min_tokens": 10}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_every_option_that_changes_scores_changes_them(name: str, options: dict[str, object]) -> None:
    assert not torch.equal(adjusted(sequence((8, 8, 9), **options)), scores()[0]), f"{name} does nothing"


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    one = sequence((8, 8, 9, 41), repetition_penalty=penalty)
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([one.token_ids]), scores())[0]
    assert torch.equal(adjusted(one), want)


def test_presence_and_frequency_see_the_output_only() -> None:
    one = sequence((8, 8, 9, 5), presence_penalty=0.5, frequency_penalty=0.25)
    want = scores()[0]
    want[8] -= 0.5 + 2 * 0.25
    want[9] -= 0.75
    want[5] -= 0.75  # also in the prompt, but once in the output
    assert torch.allclose(adjusted(one), want, atol=1e-6)
    assert torch.equal(adjusted(sequence((), presence_penalty=0.5)), scores()[0])


def test_logit_bias_forces_and_forbids() -> None:
    row = adjusted(sequence(logit_bias={9: 100.0, 3: -100.0}))
    assert row.argmax() == 9
    assert row.argmin() == 3


@pytest.mark.parametrize(("length", "banned"), [(0, True), (2, True), (3, False), (4, False)])
def test_min_tokens_bans_every_stop(length: int, banned: bool) -> None:
    row = adjusted(sequence((8,) * length, min_tokens=3, stop_token_ids=(40,), logit_bias={1: 50.0}))
    assert [i for i in range(VOCAB) if row[i] == float("-inf")] == ([1, 2, 40] if banned else [])


def test_min_tokens_with_ignored_eos_bans_only_what_stops() -> None:
    row = adjusted(sequence(min_tokens=3, stop_token_ids=(40,), ignore_eos=True))
    assert [i for i in range(VOCAB) if row[i] == float("-inf")] == [40]


MIXED: list[dict[str, object]] = [
    {}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.4}, {"temperature": 0.7, "top_k": 4, "seed": 1},
    {"temperature": 1.0, "top_p": 0.6, "presence_penalty": 1.0, "logprobs": 3}, {"logprobs": 0},
    {"temperature": 2.0, "min_p": 0.2, "seed": 9, "min_tokens": 50}, {"logit_bias": {4: 30.0}, "logprobs": 1},
    {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.3, "logprobs": 5},
]  # fmt: skip


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_rows_with_different_options_do_not_touch_each_other(name: str) -> None:
    sampler = Sampler(backend(name))
    rows = [sequence((8, 8, 9), **options) for options in MIXED]
    table = scores(len(rows))
    alone = [sampler.sample(table[i : i + 1].clone(), [rows[i]])[0] for i in range(len(rows))]
    assert sampler.sample(table.clone(), rows) == alone
    backwards = list(range(len(rows)))[::-1]
    assert sampler.sample(table[backwards].clone(), [rows[i] for i in backwards]) == alone[::-1]
    for left in range(len(rows)):  # one leaves: the rest go on as before
        kept = [i for i in range(len(rows)) if i != left]
        assert sampler.sample(table[kept].clone(), [rows[i] for i in kept]) == [alone[i] for i in kept]


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_a_seed_counts_beside_rows_without_one_and_seeds_differ(name: str) -> None:
    sampler = Sampler(backend(name))
    seeded = sequence(temperature=1.0, seed=42)
    flat = torch.zeros(3, VOCAB)
    drawn = set()
    for other in range(20):
        batch = [sequence(temperature=1.0, seed=other), seeded, sequence()]
        tokens = [one.token_id for one in sampler.sample(flat.clone(), batch)]
        assert tokens[1] == sampler.sample(flat[:1].clone(), [seeded])[0].token_id
        assert tokens[2] == 0
        drawn.add(tokens[0])
    assert len(drawn) > 8, "seeds give the same draws"


def test_position_and_choice_change_the_draw() -> None:
    sampler = Sampler(backend("cpu"))
    flat = torch.zeros(1, VOCAB)
    by_position = [sampler.sample(flat.clone(), [sequence((8,) * n, temperature=1.0)])[0].token_id for n in range(20)]
    two = sequences_of(Request("a", (5,), SamplingOptions(n=20)), LIMITS, 0)
    by_choice = [one.token_id for one in sampler.sample(flat.expand(20, -1).clone(), two)]
    assert len(set(by_position)) > 8
    assert len(set(by_choice)) > 8


def test_logprobs_are_of_the_models_own_distribution() -> None:
    one = sequence((8,), logprobs=4, temperature=0.3, repetition_penalty=1.8, logit_bias={7: 50.0})
    got = Sampler(backend("cpu")).sample(scores(), [one])[0]
    want = scores()[0].double().log_softmax(-1)
    assert got.token_id == 7
    assert got.logprobs is not None
    assert got.logprobs[0][0] == 7
    assert [token for token, _ in got.logprobs[1:]] == want.argsort(descending=True)[:4].tolist()
    for token, value in got.logprobs:
        assert value == pytest.approx(want[token].item(), abs=1e-5)


def test_logprobs_of_equal_scores_do_not_depend_on_what_others_ask() -> None:
    flat, token_logprobs = torch.zeros(3, 3000), Sampler(backend("torch")).token_logprobs
    alone = token_logprobs(flat[:1], [7], [5])
    assert token_logprobs(flat, [1, 7, 2], [20, 5, 0])[1] == alone[0]
    assert len(token_logprobs(flat, [1, 7, 2], [20, 5, 0])[2]) == 1
    assert len(token_logprobs(torch.zeros(1, 3), [1], [20])[0]) == 4


def test_logprobs_have_the_same_bits_in_any_batch() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    table = torch.randn((40, 49_152), generator=torch.Generator().manual_seed(0)) * 4
    token_logprobs = Sampler(backend("torch")).token_logprobs
    whole = token_logprobs(table, list(range(40)), [3] * 40)
    for begin, count in ((0, 1), (3, 2), (7, 16), (39, 1)):
        rows = list(range(begin, begin + count))
        assert token_logprobs(table[rows], rows, [3] * count) == whole[begin : begin + count]
    torch.set_num_threads(threads)


def test_an_eos_list_does_not_defeat_ignore_eos() -> None:
    shape = Shape(eos=tuple(range(1, 200)))
    made = rig(shape)
    made.add("stops", prompt(5, 320), max_tokens=30, ignore_eos=False)
    made.add("runs", prompt(5, 320), max_tokens=30, ignore_eos=True)
    made.run()
    assert made.finishes["stops", 0].reason == "stop"
    assert made.finishes["stops", 0].stop == made.tokens["stops", 0][-1] < 200
    assert (made.finishes["runs", 0].reason, len(made.tokens["runs", 0])) == ("length", 30)


@pytest.mark.parametrize("budget", [7, 16, 512])
def test_prompt_logprobs_over_chunks_and_slices(budget: int) -> None:
    shape = Shape()
    made = rig(shape, max_num_batched_tokens=budget)
    ids = prompt(2 * PROMPT_LOGPROB_ROWS + 1, shape.vocab)
    made.add("plain", ids[:50])
    made.add("a", ids, prompt_logprobs=2, max_tokens=1)
    made.run()
    got = made.outputs["a", 0][0].prompt_logprobs
    with torch.no_grad():
        want = reference_model(shape)(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert got is not None
    assert got[0] is None
    assert len(got) == len(ids)
    for position, entry in enumerate(got[1:], 1):
        assert entry is not None
        assert [token for token, _ in entry] == [ids[position], *want[position - 1].topk(2).indices.tolist()]
        assert entry[0][1] == pytest.approx(want[position - 1, ids[position]].item(), abs=1e-4)


def test_prompt_logprobs_of_a_cached_prompt() -> None:
    shape = Shape()
    made = rig(shape)
    ids = prompt(5, shape.vocab)
    for name in ("first", "second"):
        made.add(name, ids, prompt_logprobs=1)
        made.run()
    assert made.outputs["first", 0][0].prompt_logprobs == made.outputs["second", 0][0].prompt_logprobs
    assert made.tokens["first", 0] == made.tokens["second", 0]
