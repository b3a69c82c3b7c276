"""Tiny random checkpoints, made by transformers, so that it is the judge of what they compute.

Embeddings are drawn wide, so that greedy decoding is decided by clear margins and not by the last bits; projections
keep the size of what goes through them, so that layers do not blow rounding up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TEXT = (
    "The water runs along the headrace to the wheel, and the wheel turns the stone. ",
    "Das Wasser fließt über das Rad. 물은 수로를 따라 흐른다. ",
    "def turn(wheel, water):\n    return [stone.grind(grain) for grain in water]\n",
    "1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144 — and so on… 🌊🎡 ",
)
SPECIAL = ("<s>", "</s>")


@dataclass(frozen=True)
class Shape:
    """What a test wants of a checkpoint; the rest is small."""

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    middle: int = 96
    tied: bool = True
    bias: bool = False
    rope: tuple[tuple[str, Any], ...] = ()  # items of transformers' rope_parameters
    dtype: str = "float32"
    shards: int = 1
    vocab: int = 320
    seed: int = 0
    max_position: int = 512
    eos: tuple[int, ...] = (1,)


LLAMA3 = (
    ("rope_type", "llama3"), ("rope_theta", 10_000.0), ("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor",
    4.0), ("original_max_position_embeddings", 64),
)  # fmt: skip
LINEAR = (("rope_type", "linear"), ("rope_theta", 10_000.0), ("factor", 4.0))
SHAPES = {
    "gqa2": Shape(),
    "gqa1-untied-bias": Shape(heads=3, kv_heads=3, head_dim=24, hidden=48, tied=False, bias=True),
    "gqa3-llama3": Shape(heads=3, kv_heads=1, head_dim=64, hidden=96, middle=80, rope=LLAMA3),
    "gqa7-linear": Shape(heads=7, kv_heads=1, head_dim=16, hidden=56, middle=72, rope=LINEAR),
    "one-layer-odd": Shape(heads=6, kv_heads=2, head_dim=10, hidden=66, middle=37, layers=1, tied=False, vocab=331),
}


@cache
def cache_root() -> Path:
    """A folder for this process's checkpoints."""
    import tempfile

    # one for each process: others would see half-written files, and lose theirs to the first that ends
    root = Path(tempfile.mkdtemp(prefix="headrace-checkpoints-"))
    import atexit
    import shutil

    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def checkpoint(shape: Shape) -> Path:
    """Give the folder of a checkpoint of this shape, with a tokenizer beside it. Treat it as read-only."""
    folder = cache_root() / f"model-{abs(hash(shape)):x}"
    save_model(shape, folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_model(shape: Shape, folder: Path) -> None:
    """Write a checkpoint without a tokenizer."""
    model = reference_model(shape)
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    most = size if shape.shards == 1 else size // shape.shards + 1
    model.save_pretrained(folder, max_shard_size=most)


@cache
def reference_model(shape: Shape) -> Any:
    """The same checkpoint as a transformers model, in evaluation mode."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.middle,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.tied,
        attention_bias=shape.bias,
        mlp_bias=shape.bias,
        rope_parameters=dict(shape.rope) or {"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=0,
        eos_token_id=list(shape.eos) if len(shape.eos) > 1 else shape.eos[0],
    )
    with torch.random.fork_rng():
        torch.manual_seed(shape.seed)
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif "embed" in name or "lm_head" in name:
                torch.nn.init.normal_(parameter, std=0.5)
            else:
                gain = (
                    4.0 if "o_proj" in name or "down_proj" in name else 1.0
                )  # or tied weights would repeat their input
                torch.nn.init.normal_(parameter, std=gain * parameter.shape[1] ** -0.5)
    return model.to(getattr(torch, shape.dtype)).eval()


@cache
def tokenizer() -> Any:
    """A byte-level BPE of 320 tokens: any text and any bytes can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT, trainer)
    ends = dict(zip(("bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, **ends)
