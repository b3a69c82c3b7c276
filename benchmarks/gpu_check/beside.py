"""The same load on transformers' own continuous batching, where that runs: a figure beside ours, not a check."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from .engine import DRY, REAL, Load, work_of
from .models import ModelSizes
from .notebook import Notebook

TITLE = "transformers beside it"
HOW = (
    "`generate_batch` of transformers on random weights in bf16: the prompts of the short runs above, and for each the "
    "mean length of their answers, since it takes one length for all. What does not run is said."
)


def find(notes: Notebook) -> None:
    """Run every model."""
    load = DRY if notes.ground.dry else REAL
    for sizes in load.models:
        notes.measure(sizes.name, partial(_compare, notes, load, sizes))


def _compare(notes: Notebook, load: Load, sizes: ModelSizes) -> None:
    columns = ("model", "tokens/s", "tokens", "remark")
    try:
        rate, tokens = _run(notes, load, sizes)
    except Exception as error:  # noqa: BLE001  whatever it is, it is another's
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        notes.row("Beside", columns, sizes.name, None, None, f"did not run: {said}")
    else:
        notes.row("Beside", columns, sizes.name, notes.figure(rate), tokens, "")


def transformers_model(sizes: ModelSizes, device: torch.device) -> Any:
    """A model of random weights."""
    import transformers

    every: Any = transformers
    config = getattr(every, sizes.kind.replace("ForCausalLM", "Config"))(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.middle,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=sizes.tied,
        bos_token_id=None,
        eos_token_id=None,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return getattr(every, sizes.kind)(config).eval()
    finally:
        torch.set_default_dtype(before)


def _run(notes: Notebook, load: Load, sizes: ModelSizes) -> tuple[float, int]:
    import transformers

    every: Any = transformers
    work = work_of(load, sizes.vocab, load.fraction)
    model = transformers_model(sizes, notes.ground.device)
    each = sum(one.num_out for one in work) // len(work)
    how: dict[str, Any] = {
        "generation_config": every.GenerationConfig(
            max_new_tokens=each, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
    }
    if notes.ground.dry:  # or it takes all of the memory
        how["continuous_batching_config"] = every.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    model.generate_batch(inputs=[work[0].prompt], **how)  # the first call compiles and captures
    begun_s = time.perf_counter()
    found = model.generate_batch(inputs=[one.prompt for one in work], **how)
    seconds = time.perf_counter() - begun_s
    tokens = sum(len(one.generated_tokens) for one in found.values())
    if len(found) < len(work) or not tokens:
        raise RuntimeError(f"{len(found)} of {len(work)} requests came back, {tokens} tokens in all")
    return tokens / seconds, tokens
