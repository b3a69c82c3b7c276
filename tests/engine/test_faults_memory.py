"""What the largest step takes, whatever is asked of it and however soon, was set aside at the start."""

from __future__ import annotations

import pytest
import torch

from headrace.engine.config import read_model_config
from headrace.engine.memory import footprint
from tests.support.checkpoints import Shape, checkpoint
from tests.support.torch_rig import BACKENDS, TorchRig, prompt, rig

SHAPE = Shape(vocab=20_000, tied=False)
MAX_NUM_SEQS = 32
EVERYTHING = {
    "temperature": 1.0, "top_p": 0.9, "top_k": 15_000, "min_p": 1e-6, "repetition_penalty": 1.2,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {5: 1.0}, "min_tokens": 2, "logprobs": 20,
    "prompt_logprobs": 20, "max_tokens": 3, "ignore_eos": False,
}  # fmt: skip


def full_batch(made: TorchRig, long: int) -> None:
    """As many requests as there are places, the last with a prompt of `long` tokens."""
    for number in range(MAX_NUM_SEQS - 1):
        made.add(f"{number}", prompt(4, SHAPE.vocab, salt=number), seed=number, **EVERYTHING)
    made.add("long", prompt(long, SHAPE.vocab, salt=99), **EVERYTHING)


@pytest.mark.parametrize("long", [4, 380])
@pytest.mark.parametrize("name", BACKENDS)
def test_sorting_drawing_and_all_log_probabilities_at_once(name: str, long: int) -> None:
    made = rig(SHAPE, name, max_num_seqs=MAX_NUM_SEQS, max_model_len=400, num_kv_blocks=300)
    made.poison = False
    made.runner.on_logits = None
    planned = footprint(read_model_config(checkpoint(SHAPE)), made.config, 0, 4, torch.float32).step_bytes
    full_batch(made, long)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        made.step()
        sampled = sum(len(tokens) for tokens in made.tokens.values())
        made.step()
    assert sampled >= MAX_NUM_SEQS - 1
    live = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert 0 < peak <= planned, f"{peak} of {planned} bytes"
    made.run()
    assert all(finish.reason != "error" for finish in made.finishes.values())
