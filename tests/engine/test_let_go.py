"""Blocks that no query can reach any more come free while a sequence runs, and nothing else changes.

The rig fills free blocks with NaN before each step, so a block that comes free too early spoils what is scored.
"""

from __future__ import annotations

import pytest
import torch

from headrace.engine.window_blocks import blocks_spanned
from tests.support.families import VOCAB, WINDOW, family_checkpoint, family_reference
from tests.support.torch_rig import BACKENDS, TorchRig, prompt, rig

BLOCK = 4
TOKENS = 60
ROOMY = {"max_model_len": 300, "block_size": BLOCK, "num_kv_blocks": 300, "max_num_seqs": 8}
LARGEST = {"mistral": WINDOW, "phi3": 30, "gemma2": WINDOW, "gemma3": WINDOW, "qwen2": WINDOW}


def window_blocks_held(made: TorchRig) -> list[int]:
    """Window blocks that are held after each step."""
    pool = made.engine._blocks.pools[1]
    held: list[int] = []
    while made.engine.has_work:
        made.step()
        held.append(pool.num_blocks - pool.num_free)
    return held


@pytest.mark.parametrize(
    ("name", "caching", "backend"),
    [
        *((name, True, "cpu") for name in LARGEST),
        *((name, False, "cpu") for name in ("mistral", "gemma3")),
        *(("gemma3", True, backend) for backend in BACKENDS[1:]),
    ],
)
def test_a_long_answer_holds_no_more_than_its_window(name: str, caching: bool, backend: str) -> None:
    made = rig(family_checkpoint(name), backend, **ROOMY, enable_prefix_caching=caching, max_num_batched_tokens=7)
    window, ids = LARGEST[name], prompt(70, VOCAB)
    assert made.runner.window == window
    made.add("a", ids, max_tokens=TOKENS)
    held = window_blocks_held(made)
    assert max(held) <= blocks_spanned(window - 1 + 7, BLOCK)
    assert max(held[-TOKENS:]) <= blocks_spanned(window, BLOCK)
    assert min(held[-TOKENS:-1]) >= window // BLOCK
    assert held[-1] == 0
    with torch.no_grad():
        scores = family_reference(name)(torch.tensor([ids + made.tokens["a", 0]])).logits[0, len(ids) - 1 : -1]
    assert made.tokens["a", 0] == scores.argmax(-1).tolist()


@pytest.mark.parametrize("name", LARGEST)
def test_a_prefix_is_found_though_its_beginning_is_gone_and_not_if_its_end_is(name: str) -> None:
    made = rig(family_checkpoint(name), **ROOMY)
    ids = prompt(4 * BLOCK * 10 + 1, VOCAB)
    pool = made.engine._blocks.pools[1]
    seen = -(-(LARGEST[name] - 1) // BLOCK)
    served: list[int] = []
    for number, left in enumerate((None, seen, seen - 1)):
        made.add(f"{number}", ids, max_tokens=3)
        made.run()
        served.append(made.outputs[f"{number}", 0][0].cached_tokens)
        if left is not None:
            assert torch.equal(made.scores(f"{number}"), made.scores("0"))
        # what was freed last is used again last: the window of the prompt's last token
        pool.release(pool.allocate(pool.num_blocks - (seen, seen - 1, 0)[number]), 0)
    assert served == [0, len(ids) - 1, 0]


@pytest.mark.parametrize(("name", "caching"), [("mistral", True), ("mistral", False), ("gemma3", True)])
def test_choices_preemption_and_settled_tokens_do_with_what_is_left(name: str, caching: bool) -> None:
    folder = family_checkpoint(name)
    wanted = {str(length): prompt(length, VOCAB, salt=length) for length in (5, 9, 13, 18, 40)}

    def run(**config: object) -> TorchRig:
        made = rig(folder, **{**ROOMY, "enable_prefix_caching": caching, **config})
        for request_id, ids in wanted.items():
            made.add(request_id, ids, max_tokens=50, n=2, temperature=0.7, seed=7)
        made.add("settled", wanted["40"], max_tokens=50, settled=(tuple(range(2, 30)),))
        return made.run()

    large, tight = run(), run(num_kv_blocks=40, max_model_len=120, max_num_batched_tokens=33)
    assert tight.engine.stats().preemptions > 0
    assert large.tokens == tight.tokens
    assert all(finish.reason == "length" for finish in tight.finishes.values())


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_in_int8_chunks_and_a_cached_prefix_change_no_bit(name: str) -> None:
    made, cut = (
        rig(family_checkpoint(name), **ROOMY, kv_cache_dtype="int8", max_num_batched_tokens=most) for most in (200, 7)
    )
    for each, request_id in ((made, "whole"), (made, "warm"), (cut, "cut")):
        each.add(request_id, prompt(100, VOCAB), max_tokens=20)
        each.run()
    assert made.outputs["warm", 0][0].cached_tokens == 96
    assert torch.equal(made.scores("warm"), made.scores("whole"))
    assert torch.equal(cut.scores("cut"), made.scores("whole"))


def test_a_model_without_windows_has_one_pool() -> None:
    made = rig(family_checkpoint("mistral-no-window"), **ROOMY)
    assert (made.runner.window, made.runner.num_window_blocks, len(made.engine._blocks.pools)) == (0, 0, 1)
