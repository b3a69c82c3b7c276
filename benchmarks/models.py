"""The checkpoints that are measured: random weights in real shapes, which any engine that reads Hugging Face's form
loads.

    python -m benchmarks.models [FOLDER]

smol135  30 layers, hidden 576, 9 query heads, 3 KV heads, vocabulary 49,152, bfloat16 (the shape of SmolLM2-135M):
         bound by matrix products
tiny2    2 layers, hidden 64, vocabulary 49,152, bfloat16: so little arithmetic that what is left to measure is the
         engine's and the queue's own cost per token
micro    1 layer, hidden 32, vocabulary 512, float32: steps of a fraction of a millisecond, for runs of very many

They lie in HEADRACE_BENCH_DIR/models, or below the user's cache folder. What is there is kept.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = "HEADRACE_BENCH_DIR"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CORPUS_FILES = 800  # Python's own library is a text that every machine has


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What sets one checkpoint apart; the rest is the same for all."""

    name: str
    vocab_size: int
    dtype: str
    shape: dict[str, Any]  # further arguments of transformers' LlamaConfig


CHECKPOINTS = {
    each.name: each
    for each in (
        Checkpoint(
            "smol135", 49_152, "bfloat16",
            {
                "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                "num_key_value_heads": 3, "initializer_range": 0.041666,
            },
        ),
        Checkpoint(
            "tiny2", 49_152, "bfloat16",
            {
                "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 32,
            },
        ),
        Checkpoint(
            "micro", 512, "float32",
            {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 1, "head_dim": 16,
            },
        ),
    )
}  # fmt: skip


def models_dir() -> Path:
    """The folder of the checkpoints."""
    base = os.environ.get(DIRECTORY)
    if base:
        return Path(base) / "models"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "headrace" / "bench" / "models"


def ensure(name: str, folder: Path | None = None) -> Path:
    """Give a checkpoint's folder, written now if it is not there. Raises KeyError for an unknown name."""
    checkpoint = CHECKPOINTS[name]
    target = (folder or models_dir()) / name
    if not (target / "model.safetensors").is_file():
        unfinished = target.with_name(f".{name}-{os.getpid()}")  # so that an interrupted run leaves no half checkpoint
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            _write(checkpoint, unfinished)
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _write(checkpoint: Checkpoint, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    any_logging: Any = logging
    any_logging.disable_progress_bar()
    any_config: Any = LlamaConfig
    any_model: Any = LlamaForCausalLM
    config = any_config(
        vocab_size=checkpoint.vocab_size,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        **checkpoint.shape,
    )
    any_torch: Any = torch
    with any_torch.random.fork_rng():
        any_torch.manual_seed(0)
        model = any_model(config).to(getattr(torch, checkpoint.dtype))
    model.save_pretrained(folder)
    _tokenizer(checkpoint.vocab_size).save_pretrained(folder)


def _tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE, trained on Python's own library."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made: Any = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(str(path) for path in library.rglob("*.py") if "site-packages" not in path.parts)
    made.train(files[:_CORPUS_FILES], trainer)
    any_tokenizer: Any = PreTrainedTokenizerFast
    return any_tokenizer(tokenizer_object=made, bos_token=_SPECIAL[0], eos_token=_SPECIAL[0])


if __name__ == "__main__":
    for each in CHECKPOINTS:
        print(ensure(each, Path(sys.argv[1]) if len(sys.argv) > 1 else None))
