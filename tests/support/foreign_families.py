"""Tiny random checkpoints of what runs through transformers' own code; see `checkpoints` for how weights are drawn."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from .checkpoints import cache_root

VOCAB = 320
_OUTPUT = re.compile(r"o_proj|out_proj|down_proj|c_proj|fc2|fc_out|dense_4h_to_h|attention\.dense|self_attn\.dense")
_TABLE = re.compile(r"emb|wte|wpe|lm_head")
_COMMON = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_LAYERS = {"num_hidden_layers": 3}
_HEADS = {"hidden_size": 64, "num_attention_heads": 4}
_MODERN = {**_LAYERS, **_HEADS, "intermediate_size": 96, "max_position_embeddings": 256}
_SHARED = {**_MODERN, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 256, "n_inner": 96}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_MODERN, "rotary_pct": 0.25}),
    "opt": (
        "OPTForCausalLM",
        {**_LAYERS, **_HEADS, "ffn_dim": 96, "max_position_embeddings": 256, "word_embed_proj_dim": 64},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {**_SHARED, "sliding_window": 24}),
    "cohere": ("CohereForCausalLM", {**_SHARED, "logit_scale": 0.5}),
    "glm4": ("Glm4ForCausalLM", {**_SHARED, "head_dim": 16}),
    "gptj": ("GPTJForCausalLM", {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    "phi": ("PhiForCausalLM", _MODERN),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", {"n_layer": 3, "hidden_size": 64, "n_head": 4}),
    "falcon": ("FalconForCausalLM", {**_LAYERS, **_HEADS, "alibi": True}),
    "mamba": ("MambaForCausalLM", {**_LAYERS, "hidden_size": 64}),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", _SHARED),
    "qwen3_next": ("Qwen3NextForCausalLM", {**_SHARED, "num_hidden_layers": 4}),
    "stablelm": ("StableLmForCausalLM", _SHARED),
    "granite_swa": ("GraniteSWAForCausalLM", {**_SHARED, "sliding_window": 24}),
    "llama4_text": (
        "Llama4ForCausalLM",
        {**_SHARED, "head_dim": 16, "num_local_experts": 4, "pad_token_id": 2, "attention_chunk_size": 32},
    ),
    "llama": ("LlamaForCausalLM", _SHARED),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_MODERN, "num_key_value_heads": 4}),
    "mixtral": ("MixtralForCausalLM", {**_SHARED, "num_local_experts": 4}),
}


def family_config(family: str, **changes: Any) -> tuple[str, Any]:
    """An architecture's name, and its tiny configuration with `changes`."""
    from transformers import AutoConfig

    architecture, values = {**FAMILIES, **OTHERS}[family]
    auto: Any = AutoConfig
    return architecture, auto.for_model(family, architectures=[architecture], **{**_COMMON, **values, **changes})


@cache
def family_model(family: str, changes: tuple[tuple[str, Any], ...] = ()) -> Any:
    """A random model of transformers in evaluation mode."""
    import torch
    import transformers

    architecture, config = family_config(family, **{k: dict(v) if k == "rope_parameters" else v for k, v in changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, architecture)(config)
        for name, parameter in model.named_parameters():
            _draw(name, parameter, conv1d=family == "gpt2")
    return model.eval()


@cache
def family_checkpoint(family: str, changes: tuple[tuple[str, Any], ...] = ()) -> Path:
    """The folder of the same as a checkpoint, without a tokenizer. Treat it as read-only."""
    folder = cache_root() / f"{family}-{abs(hash(changes)):x}"
    family_model(family, changes).save_pretrained(folder)
    return folder


def _draw(name: str, parameter: Any, *, conv1d: bool) -> None:
    import torch

    if name.endswith("bias"):
        torch.nn.init.normal_(parameter, std=0.3)
    elif parameter.ndim == 1:
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    elif _TABLE.search(name):
        torch.nn.init.normal_(parameter, std=0.5)
    else:
        inputs = parameter.shape[0 if conv1d else -1]
        gain = 4.0 if _OUTPUT.search(name) else 1.0  # or tied weights would repeat their input
        torch.nn.init.normal_(parameter, std=gain * inputs**-0.5)
