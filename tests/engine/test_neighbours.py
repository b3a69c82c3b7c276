"""What else is in a step must not change a bit of a request's scores, nor any of its tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from tests.support.checkpoints import SHAPES, Shape
from tests.support.matrices import row_view
from tests.support.torch_rig import BACKENDS, TorchRig, prompt, rig

WATCHED = {"temperature": 0.8, "seed": 5, "max_tokens": 8, "top_p": 0.95, "frequency_penalty": 0.3, "logprobs": 2}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def crowd(shape: str, name: str, dtype: torch.dtype, size: int, budget: int, **config: object) -> TorchRig:
    """Run the watched request "me" among size - 1 others that ask for other things."""
    rnd = random.Random(size)
    made = rig(SHAPES[shape], name, dtype, max_num_batched_tokens=budget, **config)
    vocab = SHAPES[shape].vocab
    for number in range(size - 1):
        if number == size // 2:
            made.add("me", prompt(53, vocab), **WATCHED)
        ids = [rnd.randrange(vocab) for _ in range(rnd.randrange(1, 60))]
        options = rnd.choice([{}, {"temperature": 1.0}, {"repetition_penalty": 1.3}, {"temperature": 0.5, "top_k": 3}])
        made.add(f"{number}", ids, max_tokens=rnd.randrange(1, 12), seed=number, **options)
    if size <= 2:
        made.add("me", prompt(53, vocab), **WATCHED)
    return made.run()


@cache
def alone(shape: str, name: str, dtype: torch.dtype) -> TorchRig:
    return crowd(shape, name, dtype, 1, 512)


def assert_same(made: TorchRig, want: TorchRig) -> None:
    assert torch.equal(made.scores("me"), want.scores("me")), "scores"
    assert made.tokens["me", 0] == want.tokens["me", 0]
    assert [o.logprobs for o in made.outputs["me", 0]] == [o.logprobs for o in want.outputs["me", 0]]
    assert all(finish.reason != "error" for finish in made.finishes.values())


@pytest.mark.parametrize(("size", "budget"), [(1, 7), (2, 512), (16, 64), (17, 512), (64, 512), (64, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["gqa3-llama3", "one-layer-odd"])
def test_in_a_crowd(threads: int, shape: str, dtype: torch.dtype, size: int, budget: int) -> None:
    assert_same(crowd(shape, "cpu", dtype, size, budget), alone(shape, "cpu", dtype))


@pytest.mark.parametrize(("size", "budget"), [(1, 7), (5, 512), (17, 64)])
@pytest.mark.parametrize("shape", ["gqa7-linear", "one-layer-odd"])
@pytest.mark.parametrize("name", ["cpu-onednn", "torch"])
def test_in_a_crowd_with_products_of_torch(threads: int, name: str, shape: str, size: int, budget: int) -> None:
    assert_same(crowd(shape, name, torch.float32, size, budget), alone(shape, name, torch.float32))


def test_all_backends_agree() -> None:
    plain = alone("gqa3-llama3", "torch", torch.float32)
    for name in BACKENDS:
        other = alone("gqa3-llama3", name, torch.float32)
        assert (other.scores("me") - plain.scores("me")).abs().max() < 1e-4
        assert other.tokens["me", 0] == plain.tokens["me", 0]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_only_wants_the_best_gets_what_the_stored_scores_give(name: str, dtype: torch.dtype) -> None:
    # watched, every row's scores are stored; unwatched, greedy rows skip that, beside rows that sample
    watched, unwatched = (rig(SHAPES["gqa3-llama3"], name, dtype) for _ in range(2))
    unwatched.runner.on_logits = None
    for made in (watched, unwatched):
        for number in range(12):
            sampled = {"temperature": 0.8, "seed": number} if number % 3 == 0 else {}
            held = {"min_tokens": 3, "ignore_eos": False} if number % 4 == 1 else {}
            made.add(f"{number}", prompt(5 + number, 99, salt=number), max_tokens=6, **sampled, **held)
        made.run()
    assert watched.tokens == unwatched.tokens
    assert watched.finishes == unwatched.finishes


@pytest.mark.parametrize("size", [17, 20])
def test_a_batch_of_any_size_below_the_limit(size: int) -> None:
    made = crowd("gqa2", "cpu", torch.float32, size, 512, max_num_seqs=20)
    assert len(made.finishes) == size
    assert_same(made, alone("gqa2", "cpu", torch.float32))


@pytest.mark.parametrize("caching", [True, False])
def test_under_block_pressure(caching: bool) -> None:
    # blocks for about two of the twelve at a time: preempted, computed again, and still the same
    made = crowd(
        "gqa2", "cpu", torch.float32, 12, 512, num_kv_blocks=30, enable_prefix_caching=caching, max_model_len=100
    )
    assert made.engine.stats().preemptions > 0 or made.engine.stats().step > 30
    assert_same(made, alone("gqa2", "cpu", torch.float32))


def test_choices_of_one_request_are_those_of_lone_runs() -> None:
    shape = SHAPES["gqa2"]
    together, apart = rig(shape), rig(shape, enable_prefix_caching=False)
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 10, "n": 4}
    together.add("me", prompt(22, shape.vocab), **options)
    together.run()
    assert len({tuple(together.tokens["me", choice]) for choice in range(4)}) > 1
    for choice in range(4):
        settled = tuple(() if c == choice else tuple(together.tokens["me", c]) for c in range(4))
        apart.add(f"only {choice}", prompt(22, shape.vocab), settled=settled, **options)
        apart.run()
        assert apart.tokens[f"only {choice}", choice] == together.tokens["me", choice]
        assert torch.equal(apart.scores(f"only {choice}", choice), together.scores("me", choice))


@pytest.mark.parametrize("cut", range(1, 8))
def test_going_on_after_another_attempt(cut: int) -> None:
    # penalties, min_tokens, positions and seeds see the settled tokens as if this attempt had sampled them
    shape = SHAPES["gqa2"]
    options = {**WATCHED, "repetition_penalty": 1.2, "presence_penalty": 0.4, "min_tokens": 6, "ignore_eos": False}
    whole, rest = rig(shape), rig(shape)
    whole.add("me", prompt(19, shape.vocab), **options)
    tokens = whole.run().tokens["me", 0]
    rest.add("me", prompt(19, shape.vocab), settled=(tuple(tokens[:cut]),), **options)
    rest.run()
    assert rest.tokens["me", 0] == tokens[cut:]
    assert torch.equal(rest.scores("me"), whole.scores("me")[cut:])


def spoil(made: TorchRig, token: int) -> None:
    """Give one token an embedding of NaN, in a model whose output table is a tensor of its own."""
    row_view(made.runner.model.weights.embedding, token).fill_(float("nan"))


def test_a_row_that_is_not_finite_fails_alone() -> None:
    shape = Shape(tied=False)
    made = rig(shape)
    spoil(made, 77)
    ids = [i for i in prompt(40, shape.vocab) if i != 77]
    for number in range(5):
        made.add(f"good {number}", ids[: 20 + number])
    made.add("bad", [*ids[:10], 77, *ids[10:20]])
    made.run()
    assert made.finishes["bad", 0].reason == "error"
    assert made.finishes["bad", 0].error == "numeric"
    good = {key[0] for key, finish in made.finishes.items() if finish.reason == "length"}
    assert good == {f"good {number}" for number in range(5)}


def test_a_chunk_that_is_partly_not_finite_fails_at_once() -> None:
    # the first chunk samples nothing, and its rows are finite up to the 80th: it must not enter the prefix cache
    shape = Shape(tied=False)
    made = rig(shape, max_num_batched_tokens=90)
    spoil(made, 77)
    ids = [i for i in prompt(200, shape.vocab) if i != 77]
    made.add("bad", [*ids[:80], 77, *ids[80:120]])
    made.step()
    assert made.finishes["bad", 0].error == "numeric"
    assert made.engine.stats().cached_blocks == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_fail_although_the_hidden_states_are(value: float) -> None:
    made = rig(Shape(tied=False))
    row_view(made.runner.model.weights.output, 33).fill_(value)
    made.add("a", [5, 6, 7])
    made.run()
    assert made.finishes["a", 0].error == "numeric"
    assert made.tokens["a", 0] == []
