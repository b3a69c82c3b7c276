"""An int8 KV cache: how close it stays to an exact one, and that sharing, copying and coming back work with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.engine.config import read_model_config
from headrace.engine.load import load_runner
from headrace.engine.memory import footprint, plan_num_blocks
from headrace.engine.types import EngineConfig
from tests.support.checkpoints import Shape, checkpoint
from tests.support.torch_rig import BACKENDS, TorchRig, backend, prompt, rig

SHAPE = Shape()
DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo-model"


def demo(kv_cache_dtype: str, name: str) -> TorchRig:
    config = EngineConfig(
        max_num_seqs=16, max_num_batched_tokens=512, block_size=16, num_kv_blocks=200, max_model_len=256,
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    runner = load_runner(DEMO, read_model_config(DEMO), config, torch.float32, backend(name))
    return TorchRig(runner, config)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_demo_model_says_the_same_with_int8_at_98_of_100_positions(name: str) -> None:
    """Both see the same text, which the exact cache gave, and are asked for every next token of it."""
    exact, rounded = demo("fp32", name), demo("int8", name)
    length, heads = 60, [[5 + 7 * number, 300 + number, 17] for number in range(8)]
    for number, ids in enumerate(heads):
        exact.add(f"{number}", ids, max_tokens=length)
    exact.run()
    agreed = 0
    for number, ids in enumerate(heads):
        text = exact.tokens[f"{number}", 0]
        for position in range(0, length, 4):
            rounded.add(f"{number} {position}", [*ids, *text[:position]], max_tokens=1)
        rounded.run()
        agreed += sum(rounded.tokens[f"{number} {at}", 0][0] == text[at] for at in range(0, length, 4))
    asked = 8 * len(range(0, length, 4))
    assert agreed >= 0.98 * asked, f"{agreed} of {asked}"
    scores = rounded.scores("0 0"), exact.scores("0")[:1]
    assert not torch.equal(*scores), "nothing was rounded"


def test_twice_the_blocks_of_bfloat16_or_nearly() -> None:
    model = read_model_config(checkpoint(Shape(head_dim=64)))
    sizes = [footprint(model, EngineConfig(), 0, 2, dtype) for dtype in (torch.bfloat16, torch.int8)]
    bf16, int8 = (plan_num_blocks(size, EngineConfig(max_num_seqs=10**6), 256, 1 << 33) for size in sizes)
    assert int8.full / bf16.full == pytest.approx(2 * 64 / (64 + 4), rel=0.01)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block_size", [4, 16])
def test_choices_part_ways_and_come_back(name: str, block_size: int) -> None:
    """Four choices share a prompt's blocks and copy the last one; with too few blocks for all, the same comes out."""
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "n": 4}
    config = {"kv_cache_dtype": "int8", "block_size": block_size, "max_model_len": 60}
    roomy, tight = (rig(SHAPE, name, num_kv_blocks=tokens // block_size, **config) for tokens in (2000, 72))
    for made in (roomy, tight):
        made.add("me", prompt(22, SHAPE.vocab), **options)
        made.run()
    assert tight.engine.stats().preemptions > 0
    for choice in range(4):
        assert torch.equal(roomy.scores("me", choice), tight.scores("me", choice))
        assert roomy.tokens["me", choice] == tight.tokens["me", choice]
