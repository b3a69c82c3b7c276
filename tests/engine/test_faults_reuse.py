"""What was computed before and is used again: a second answer is the first one, only sooner."""

from __future__ import annotations

import time

import pytest
import torch

from headrace.engine import LLM, EngineConfig, SamplingOptions
from headrace.engine.types import TokenLogprobs
from tests.support.checkpoints import Shape, checkpoint
from tests.support.matrices import row_view
from tests.support.torch_rig import TorchRig, prompt, rig

SHAPE = Shape()
VOCAB = SHAPE.vocab


def test_answers_that_a_stop_string_ended_spoil_no_later_one() -> None:
    config = EngineConfig(max_num_seqs=8, block_size=4, num_kv_blocks=80, max_model_len=160)
    cold = LLM(checkpoint(SHAPE), EngineConfig(**{**as_dict(config), "enable_prefix_caching": False}))
    warm = LLM(checkpoint(SHAPE), config)
    greedy = SamplingOptions(max_tokens=24, temperature=0, ignore_eos=True)
    heads = ["The water runs along the headrace, Q:", "The water runs along the headrace, A:"]
    whole = [one.text for one in cold.generate(heads, greedy)]
    stops = [(text[7:9], text[12:15]) for text in whole]  # found in the middle of a block, at different steps
    stopped = warm.generate(
        heads, [SamplingOptions(max_tokens=24, temperature=0, ignore_eos=True, stop=stop) for stop in stops]
    )
    assert [one.finish.reason for one in stopped] == ["stop", "stop"]
    assert all(len(one.text) < len(text) for one, text in zip(stopped, whole, strict=True))
    targets = heads + [head + text[:cut] for head, text in zip(heads, whole, strict=True) for cut in (5, 9, 14)]
    hits = warm.engine.stats().prefix_hits
    assert [one.text for one in warm.generate(targets, greedy)] == [one.text for one in cold.generate(targets, greedy)]
    assert warm.engine.stats().prefix_hits > hits


def as_dict(config: EngineConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__}


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp32", "int8"])
def test_a_cache_of_lower_precision_gives_the_same_cold_and_warm(kv_cache_dtype: str) -> None:
    """If a chunk saw its own keys before they were rounded, and a later request the rounded ones, they would differ."""
    made = rig(SHAPE, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=32)
    ids = prompt(101, VOCAB)
    for name in ("cold", "warm", "again"):
        made.add(name, ids, max_tokens=6)
        made.run()
    assert [made.outputs[name, 0][0].cached_tokens for name in ("cold", "warm", "again")] == [0, 100, 100]
    assert torch.equal(made.scores("cold"), made.scores("warm"))
    assert torch.equal(made.scores("cold"), made.scores("again"))


def test_cancelling_in_the_prefill_and_asking_again_changes_nobody_elses_scores() -> None:
    prompts = [[*prompt(40, VOCAB), 7 + number, *prompt(23, VOCAB, salt=number)] for number in range(6)]
    undisturbed, disturbed = rig(SHAPE, max_num_batched_tokens=16), rig(SHAPE, max_num_batched_tokens=16)
    for made in (undisturbed, disturbed):
        for number, ids in enumerate(prompts):
            if number != 1 or made is disturbed:
                made.add(f"r{number}", ids, max_tokens=5)
    undisturbed.run()
    for attempt in range(3):
        for _ in range(4):  # sixteen tokens a step: the first request is not even through its prompt
            disturbed.step()
        disturbed.engine.abort("r1" if attempt == 0 else f"r1 again {attempt}")
        disturbed.add(f"r1 again {attempt + 1}", prompts[1], max_tokens=5)
    disturbed.run()
    for number in (0, 2, 3, 4, 5):
        assert torch.equal(disturbed.scores(f"r{number}"), undisturbed.scores(f"r{number}"))
    assert ("r1 again 3", 0) in disturbed.finishes


def told(made: TorchRig, name: str, ids: list[int]) -> tuple[TokenLogprobs | None, ...]:
    made.add(name, ids, prompt_logprobs=1, max_tokens=2)
    made.run()
    found = made.outputs[name, 0][0].prompt_logprobs
    assert found is not None
    return found


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 13])
def test_prompt_log_probabilities_of_a_prompt_that_others_have_computed(length: int) -> None:
    """However much of it is in the cache: one value for each token, the first none, and the same as cold."""
    ids = prompt(length, VOCAB, salt=length)
    cold = told(rig(SHAPE), "cold", ids)
    made = rig(SHAPE)
    made.add("plain", [*ids, 5, 6], max_tokens=3)
    made.run()
    assert told(made, "first", ids) == told(made, "second", ids) == cold
    assert len(cold) == length
    assert cold[0] is None
    assert None not in cold[1:]


def test_a_row_that_is_not_finite_leaves_nothing_to_be_found() -> None:
    shape = Shape(tied=False)
    made = rig(shape, max_num_batched_tokens=16)
    embedding = row_view(made.runner.model.weights.embedding, 77)
    good = embedding.clone()
    ids = [each for each in prompt(60, VOCAB) if each != 77][:50]
    bad = [*ids[:20], 77, *ids[20:40]]
    embedding.fill_(float("nan"))
    made.add("bad", bad)
    made.add("beside", [*ids[:20], 78, *ids[20:40]])
    made.run()
    assert made.finishes["bad", 0].error == "numeric"
    assert made.finishes["beside", 0].reason == "length"
    embedding.copy_(good)
    made.add("mended", bad)
    made.run()
    cold = rig(shape)
    cold.add("mended", bad)
    cold.run()
    assert made.outputs["mended", 0][0].cached_tokens == 20  # what came before the bad token, and was finite
    assert torch.equal(made.scores("mended"), cold.scores("mended"))


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_padding_writes_nowhere(name: str) -> None:
    """Rows that only fill up a batch have the slot -1, which as an index is the last of all."""
    made = rig(SHAPE, name, num_kv_blocks=40)
    made.poison = False
    cache = made.runner._cache.groups[0]
    cache[:, :, -1] = 123.0
    for number in range(5):
        made.add(f"r{number}", prompt(3 + number, VOCAB, salt=number), max_tokens=3 + 2 * number)
    padded = set()
    while made.engine.has_work:
        made.step()
        padded.add(-made.engine.stats().running % 4)
    assert len(padded) > 2
    assert 39 in made.engine.free_block_ids()
    assert (cache[:, :, -1] == 123.0).all()


def test_the_first_token_behind_a_long_head_that_is_known_comes_in_a_fraction_of_the_time() -> None:
    """Head of 1,536 tokens: of the cold request's time, the warm one takes what its own 20 tokens take."""
    shape = Shape(
        hidden=256, heads=8, kv_heads=4, head_dim=32, layers=8, middle=688, vocab=1000, max_position=2048, seed=3
    )
    made = rig(shape, block_size=16, num_kv_blocks=220, max_model_len=2048)
    made.poison = False
    head = prompt(1536, shape.vocab)

    def first_token_s(name: str, tail: int) -> float:
        """CPU seconds of this thread, which does all the work."""
        made.add(name, [*head, *prompt(20, shape.vocab, salt=tail)], max_tokens=1)
        begun_s = time.thread_time()
        made.run()
        return time.thread_time() - begun_s

    made.add("other", prompt(40, shape.vocab, salt=77), max_tokens=2)  # whatever is done once is done here
    made.run()
    cold_s = first_token_s("cold", 1)
    warm_s = min(first_token_s(f"warm {tail}", tail) for tail in (2, 3, 4))
    assert made.outputs["warm 2", 0][0].cached_tokens == 1536
    assert warm_s <= 0.08 * cold_s, f"{warm_s * 1000:.1f} ms of {cold_s * 1000:.1f} ms"
