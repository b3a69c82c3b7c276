"""Scores against transformers, in float32, wherever a prompt ends in its blocks and however it was cut into chunks."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.support.checkpoints import SHAPES, Shape, reference_model
from tests.support.torch_rig import BACKENDS, TorchRig, prompt, rig

CLOSE = 1e-4
LENGTHS = {4: (*range(1, 14), 31, 32, 33, 64, 65), 16: (*range(1, 35), 47, 48, 49)}


@cache
def reference_scores(shape: Shape, ids: tuple[int, ...]) -> torch.Tensor:
    """What transformers scores after each position, [positions, vocab]."""
    with torch.no_grad():
        scores: torch.Tensor = reference_model(shape)(torch.tensor([ids])).logits[0]
    return scores


def assert_scores(made: TorchRig, shape: Shape, request_id: str, ids: list[int]) -> None:
    """Compare every sampled position of a request with transformers on the same tokens."""
    tokens = made.tokens[request_id, 0]
    want = reference_scores(shape, tuple(ids + tokens))[len(ids) - 1 : -1]
    off = (made.scores(request_id) - want).abs().max().item()
    assert off < CLOSE, f"{request_id}: scores are off by {off:.2g}"
    assert tokens == want.argmax(-1).tolist()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_size", [4, 16])
def test_every_offset_in_a_block_whole(name: str, shape: str, block_size: int) -> None:
    made = rig(SHAPES[shape], name, block_size=block_size)
    prompts = {str(length): prompt(length, SHAPES[shape].vocab, salt=length) for length in LENGTHS[block_size]}
    for request_id, ids in prompts.items():
        made.add(request_id, ids, max_tokens=6)
    made.run()
    for request_id, ids in prompts.items():
        assert_scores(made, SHAPES[shape], request_id, ids)


@pytest.mark.parametrize("shape", ["gqa2", "gqa3-llama3"])
@pytest.mark.parametrize(("block_size", "budget"), [(4, 3), (4, 5), (16, 7), (16, 16), (16, 33)])
def test_chunked(shape: str, block_size: int, budget: int) -> None:
    made = rig(SHAPES[shape], block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=3)
    prompts = {str(length): prompt(length, SHAPES[shape].vocab, salt=length) for length in (1, 4, 15, 16, 17, 33, 70)}
    for request_id, ids in prompts.items():
        made.add(request_id, ids)
    made.run()
    for request_id, ids in prompts.items():
        assert_scores(made, SHAPES[shape], request_id, ids)


@pytest.mark.parametrize("block_size", [4, 16])
def test_after_a_prefix_hit_that_ends_anywhere_in_a_block(block_size: int) -> None:
    # for every offset r: a prompt of 2 blocks + r, then the same prompt and one token more, in one engine
    shape = SHAPES["gqa2"]
    made = rig(shape, block_size=block_size)
    for r in range(block_size):
        ids = prompt(2 * block_size + r + 1, shape.vocab, salt=r)
        for request_id, some in ((f"{r}", ids[:-1]), (f"{r}+1", ids), (f"{r} again", ids[:-1])):
            made.add(request_id, some, max_tokens=3)
            made.run()
            assert_scores(made, shape, request_id, some)
        assert made.outputs[f"{r}+1", 0][0].cached_tokens == 2 * block_size
        assert torch.equal(made.scores(f"{r}"), made.scores(f"{r} again"))


def test_hits_of_different_length_in_one_batch() -> None:
    shape = SHAPES["gqa2"]
    made = rig(shape)
    long = prompt(170, shape.vocab)
    made.add("warm", long, max_tokens=1)
    made.run()
    prompts = {"none": prompt(21, shape.vocab, salt=9), "one": [*long[:4], 5, 6], "forty": [*long[:163], 7]}
    for request_id, ids in prompts.items():
        made.add(request_id, ids)
    made.run()
    assert [made.outputs[request_id, 0][0].cached_tokens for request_id in prompts] == [0, 4, 160]
    for request_id, ids in prompts.items():
        assert_scores(made, shape, request_id, ids)


def test_bfloat16_is_near() -> None:
    # both round to 8 bits after each operation, at other places: scores up to 16 agree to a few units of 2⁻⁴
    shape = Shape(dtype="bfloat16")
    made = rig(shape, dtype=torch.bfloat16)
    ids = prompt(40, shape.vocab)
    made.add("a", ids, max_tokens=1)
    made.run()
    want = reference_scores(Shape(), tuple(ids))[-1]
    assert (made.scores("a")[0] - want).abs().max() < 0.05 * want.abs().max()


def test_sharded_weights_are_the_same_model() -> None:
    whole, sharded = rig(Shape()), rig(Shape(shards=3))
    for made in (whole, sharded):
        made.add("a", prompt(20, 320))
        made.run()
    assert torch.equal(whole.scores("a"), sharded.scores("a"))
