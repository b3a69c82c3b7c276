"""A hundred prompts with a secret word each, in a pool for a third of their prefixes: nobody says another's word."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from headrace.engine.engine import Engine
from headrace.engine.sequence import Sequence
from headrace.engine.types import EngineConfig, Request, SamplingOptions
from tests.support.canary import FIRST_WORD, NUM_PROMPTS, Answer, Canary, canaries, num_prefixes, run_canaries
from tests.support.checkpoints import Shape
from tests.support.families import family_checkpoint
from tests.support.scripted import ScriptedRunner
from tests.support.torch_rig import rig

BLOCK_SIZE = 4
NUM_BLOCKS = 64
SHAPE = Shape(hidden=32, heads=2, kv_heads=1, middle=48)
SETTINGS = EngineConfig(max_num_seqs=16, max_num_batched_tokens=48, block_size=BLOCK_SIZE, num_kv_blocks=NUM_BLOCKS)
WITH_WINDOWS = ("mistral", "gemma3")


def shape_of(name: str) -> Shape | Path:
    """The small Llama, or another family's checkpoint."""
    return SHAPE if name == "llama" else family_checkpoint(name)


class Reciter(ScriptedRunner):
    """Says the prompt once more, but as it stands in the blocks of the sequence: what it reads there, it says.

    The judge of the scripted runner is switched off: what is wrong must show in the answers.
    """

    def _read_back(self, row: object) -> None:
        pass

    def _scripted(self, sequence: Sequence) -> int:
        position = sequence.num_output_tokens
        if position >= sequence.num_prompt_tokens:
            return min(self.eos_token_ids)
        index, slot = divmod(position, self.block_size)
        return self.blocks[sequence.block_ids[index]].tokens[slot] % self.vocab_size  # a poisoned slot is a stranger


def make(seed: int) -> tuple[random.Random, list[Canary]]:
    rng = random.Random(seed)
    prompts = canaries(rng, BLOCK_SIZE)
    assert num_prefixes(prompts, BLOCK_SIZE) >= 3 * NUM_BLOCKS
    return rng, prompts


def check_reports(answers: list[Answer], *, caching: bool) -> None:
    """All came to their end, and what is reported as cached is what was not computed."""
    assert len(answers) == 2 * NUM_PROMPTS
    assert all(answer.cached == answer.begins for answer in answers)
    assert any(answer.cached > 0 for answer in answers) == caching


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_answer_holds_a_foreign_word_and_every_answer_finds_its_own(seed: int, caching: bool) -> None:
    rng, prompts = make(seed)
    runner = Reciter(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=320, eos_token_ids=frozenset({1}))
    engine = Engine(
        runner, EngineConfig(SETTINGS.max_num_seqs, SETTINGS.max_num_batched_tokens, enable_prefix_caching=caching)
    )

    def options(_: Canary) -> SamplingOptions:
        return SamplingOptions(max_tokens=200, temperature=0)

    def poison() -> None:
        runner.poison(engine.free_block_ids())

    answers = run_canaries(engine, prompts, rng, options=options, before_step=poison)
    check_reports(answers, caching=caching)
    for answer in answers:
        said = {token for token in answer.token_ids if token >= FIRST_WORD}
        assert said == {answer.canary.word}
        assert answer.token_ids == [*answer.canary.token_ids, 1]
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize(
    ("name", "caching"), [("llama", True), ("llama", False), *((name, True) for name in WITH_WINDOWS)]
)
def test_a_models_answers_are_those_that_a_cold_engine_gives_to_each_prompt_alone(name: str, caching: bool) -> None:
    rng, prompts = make(3)
    rigged = rig(
        shape_of(name),
        max_num_seqs=16,
        max_num_batched_tokens=48,
        num_kv_blocks=NUM_BLOCKS,
        enable_prefix_caching=caching,
    )
    answers = run_canaries(rigged.engine, prompts, rng, options=half_greedy, before_step=rigged.poison_free)
    check_reports(answers, caching=caching)
    alone = alone_answers(name, tuple(prompts))
    assert len({tuple(tokens) for tokens in alone.values()}) > 0.9 * NUM_PROMPTS, "the answers must tell prompts apart"
    for answer in answers:
        assert answer.token_ids == alone[answer.canary.word]
    assert rigged.engine.stats().preemptions > 0


def half_greedy(canary: Canary) -> SamplingOptions:
    """Half of them greedy, half of them drawn; long enough that blocks run out."""
    greedy = canary.word % 2
    return SamplingOptions(
        max_tokens=14 + canary.word % 7, temperature=0 if greedy else 0.9, seed=canary.word, ignore_eos=True
    )


@cache
def alone_answers(name: str, prompts: tuple[Canary, ...]) -> dict[int, list[int]]:
    """What each prompt gives with nobody beside it and nothing in the cache, by its word."""
    cold = rig(shape_of(name), max_num_seqs=1, num_kv_blocks=16, max_model_len=64, enable_prefix_caching=False)
    cold.poison = False
    for canary in prompts:
        cold.engine.add(Request(f"{canary.word}", canary.token_ids, half_greedy(canary)))
    cold.run()
    return {canary.word: cold.tokens[f"{canary.word}", 0] for canary in prompts}
