"""KV caches that round: how close they stay to an exact one, and that sharing, copying and coming back work too."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from headrace.engine.config import read_model_config
from headrace.engine.load import KV_DTYPES, load_runner
from headrace.engine.memory import footprint, plan_num_blocks
from headrace.engine.tokenizer import load_tokenizer
from headrace.engine.types import EngineConfig
from tests.support.checkpoints import Shape, checkpoint
from tests.support.torch_rig import BACKENDS, TorchRig, backend, prompt, rig

SHAPE = Shape()
DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo-model"
TEXTS = (
    "A river is", "The kettle sang, and", "Rain fell on the roof while", "To bake bread you",
    "Once there was a small boat that", "The old miller said", "In winter the lake", "Every morning the baker",
)  # fmt: skip
ROUNDED = ("int8", "fp8_e4m3", "fp8_e5m2")
# Attention over float8 is plain torch whatever the backend: the compiled one stands for both of its kind.
KINDS = [*(("int8", name) for name in BACKENDS), *((kind, name) for kind in ROUNDED[1:] for name in ("cpu", "torch"))]


def demo(kv_cache_dtype: str, name: str) -> TorchRig:
    config = EngineConfig(
        max_num_seqs=16, max_num_batched_tokens=512, block_size=16, num_kv_blocks=200, max_model_len=256,
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    runner = load_runner(DEMO, read_model_config(DEMO), config, torch.float32, backend(name))
    return TorchRig(runner, config)


@cache
def texts() -> list[tuple[list[int], list[int]]]:
    """Beginnings, and how an exact cache goes on."""
    exact, tokenizer = demo("fp32", "cpu"), load_tokenizer(DEMO)
    heads = [list(tokenizer.encode(text)) for text in TEXTS]
    for number, ids in enumerate(heads):
        exact.add(f"{number}", ids, max_tokens=60)
    exact.run()
    return [(ids, exact.tokens[f"{number}", 0]) for number, ids in enumerate(heads)]


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_the_demo_model_says_the_same_at_98_of_100_positions(kind: str, name: str) -> None:
    """Asked for every second next token of texts that an exact cache gave."""
    rounded, asked, agreed = demo(kind, name), 0, 0
    for number, (ids, text) in enumerate(texts()):
        places = range(number % 2, len(text), 2)
        for at in places:
            rounded.add(f"{number} {at}", [*ids, *text[:at]], max_tokens=1)
        rounded.run()
        asked += len(places)
        agreed += sum(rounded.tokens[f"{number} {at}", 0][0] == text[at] for at in places)
    assert asked == 240
    assert agreed >= 0.98 * asked, f"{agreed} of {asked}"


@pytest.mark.parametrize("kind", ROUNDED)
def test_something_is_rounded(kind: str) -> None:
    exact, rounded = demo("fp32", "cpu"), demo(kind, "cpu")
    for made in (exact, rounded):
        made.add("me", texts()[0][0], max_tokens=2)
        made.run()
    assert not torch.equal(exact.scores("me"), rounded.scores("me"))


@pytest.mark.parametrize(("kind", "times"), [("int8", 2 * 64 / (64 + 4)), ("fp8_e4m3", 2.0), ("fp8_e5m2", 2.0)])
def test_twice_the_blocks_of_bfloat16_or_nearly(kind: str, times: float) -> None:
    model = read_model_config(checkpoint(Shape(head_dim=64)))
    sizes = [footprint(model, EngineConfig(), 0, 2, dtype) for dtype in (torch.bfloat16, KV_DTYPES[kind])]
    bf16, small = (plan_num_blocks(size, EngineConfig(max_num_seqs=10**6), 256, 1 << 33) for size in sizes)
    assert small.full / bf16.full == pytest.approx(times, rel=0.01)


@pytest.mark.parametrize(("kind", "name"), KINDS)
@pytest.mark.parametrize("block_size", [4, 16])
def test_choices_part_ways_and_come_back(kind: str, name: str, block_size: int) -> None:
    """Four choices share a prompt's blocks and copy the last one; with too few blocks for all, the same comes out."""
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "n": 4}
    config = {"kv_cache_dtype": kind, "block_size": block_size, "max_model_len": 60}
    roomy, tight = (rig(SHAPE, name, num_kv_blocks=tokens // block_size, **config) for tokens in (2000, 72))
    for made in (roomy, tight):
        made.add("me", prompt(22, SHAPE.vocab), **options)
        made.run()
    assert tight.engine.stats().preemptions > 0
    for choice in range(4):
        assert torch.equal(roomy.scores("me", choice), tight.scores("me", choice))
        assert roomy.tokens["me", choice] == tight.tokens["me", choice]


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_prompt_from_the_cache_gives_the_same(kind: str) -> None:
    """A thousand tokens twice: what the cache of prefixes serves is what was computed."""
    shape = Shape(max_position=1100)
    made = rig(shape, "cpu", kv_cache_dtype=kind, max_model_len=1100, num_kv_blocks=1200)
    for name in ("cold", "warm"):
        made.add(name, prompt(1001, SHAPE.vocab))
        made.run()
    assert made.outputs["warm", 0][0].cached_tokens >= 900
    assert torch.equal(made.scores("cold"), made.scores("warm"))
