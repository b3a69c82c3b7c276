"""Where every layer has the same window, blocks that no query can reach come free while a sequence runs.

The rig fills free blocks with NaN before each step, so a block that comes free too early spoils what is scored.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.families import VOCAB, WINDOW, family_checkpoint
from tests.support.torch_rig import BACKENDS, TorchRig, prompt, rig

BLOCK = 4
TOKENS = 90
FREES = {"max_model_len": 300, "block_size": BLOCK, "num_kv_blocks": 300, "enable_prefix_caching": False}


def held_while_running(made: TorchRig) -> list[int]:
    """Blocks that are held after each step."""
    held: list[int] = []
    while made.engine.has_work:
        made.step()
        held.append(made.runner.num_blocks - len(made.engine.free_block_ids()))
    return held


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_a_long_answer_holds_no_more_than_its_window(name: str, backend: str) -> None:
    folder = family_checkpoint(name)
    cached = rig(folder, backend, **{**FREES, "enable_prefix_caching": True})
    freeing = rig(folder, backend, **FREES, max_num_batched_tokens=7)
    window = {"mistral": WINDOW, "phi3": 30}[name]
    assert freeing.runner.window == window
    for made in (cached, freeing):
        made.add("a", prompt(70, VOCAB), max_tokens=TOKENS)
    cached.run()
    held = held_while_running(freeing)
    # the window, one block that it begins in and one that it ends in, and the block of the token to come
    assert max(held[-TOKENS:-1]) <= window // BLOCK + 3
    assert min(held[-TOKENS:-1]) >= window // BLOCK
    assert held[-1] == 0
    assert torch.equal(freeing.scores("a"), cached.scores("a"))


def test_choices_preemption_and_settled_tokens_do_with_what_is_left() -> None:
    folder = family_checkpoint("mistral")
    wanted = {str(length): prompt(length, VOCAB, salt=length) for length in (5, 9, 13, 18, 40)}

    def run(**config: object) -> TorchRig:
        made = rig(folder, **{**FREES, **config})
        for request_id, ids in wanted.items():
            made.add(request_id, ids, max_tokens=50, n=2, temperature=0.7, seed=7)
        made.add("settled", wanted["40"], max_tokens=50, settled=(tuple(range(2, 30)),))
        return made.run()

    large, tight = run(), run(num_kv_blocks=40, max_model_len=120, max_num_batched_tokens=33)
    assert tight.engine.stats().preemptions > 0
    assert large.tokens == tight.tokens
    assert all(finish.reason == "length" for finish in tight.finishes.values())


def test_layers_that_see_all_keep_all() -> None:
    for name in ("gemma2", "qwen2", "mistral-no-window"):
        assert rig(family_checkpoint(name), **FREES).runner.window == 0
