"""Tiny random checkpoints of every architecture that is taken, made by transformers, so that it is the judge.

Each has what sets its architecture apart switched on, and sizes at which that shows: windows shorter than the prompts,
caps that bend, multipliers that are not one. Weights are drawn as in `checkpoints`, so that margins are clear.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from .checkpoints import cache_root, tokenizer

VOCAB = 320
LAYERS = 4
WINDOW = 24
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads":
    4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
ORIGINAL = 64  # length from which the rotary embeddings of some are stretched
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7], "long_factor":
    [1.0, 1.5, 2.5, 4.0, 6.0, 8.0], "partial_rotary_factor": 0.75,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name → architecture, what it has besides
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 24}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"sliding_window": 30}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 20, "final_logit_softcapping": 1.5,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.4, "logits_scaling":
            3.0, "attention_bias": True, "mlp_bias": True,
        },
    ),
    "olmo2": ("Olmo2", {"num_attention_heads": 6, "hidden_size": 72}),
    "qwen3-moe": ("Qwen3Moe", {
        "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": False,
        "head_dim": 24,
    }),
    "mixtral": ("Mixtral", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128, "sliding_window": WINDOW,
    }),
    "gpt-oss": ("GptOss", {
        "head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 128, "sliding_window":
        WINDOW, "swiglu_limit": 1.25, "rope_parameters": {**YARN, "truncate": False},
    }),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "llama-dynamic": ("Llama", {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}, "max_position_embeddings":
        ORIGINAL,
    }),
}  # fmt: skip


@cache
def family_checkpoint(name: str) -> Path:
    """The folder of a checkpoint with a tokenizer beside it. Treat it as read-only."""
    folder = cache_root() / f"family-{name}"
    family_reference(name).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@cache
def family_reference(name: str) -> Any:
    """The same checkpoint as a transformers model, in evaluation mode."""
    architecture, options = MODELS[name]
    return build(architecture, {**COMMON, **options})


def build(architecture: str, options: dict[str, Any]) -> Any:
    """A transformers model with weights drawn."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = getattr(transformers, f"{architecture}Config")(**options)
    return draw(getattr(transformers, f"{architecture.removesuffix('Text')}ForCausalLM")(config))


def draw(model: Any) -> Any:
    """Draw a model's weights, the same each time; embeddings are drawn smaller where they are scaled up again."""
    import torch

    config = model.config
    offset = 1.0 if config.model_type.startswith("gemma") else 0.0
    scaled = config.hidden_size**0.5 if offset else getattr(config, "embedding_multiplier", 1.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(parameter, std=1.0 if name.endswith("sinks") else 0.3)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5 - offset, 1.5 - offset)
            elif "embed" in name:
                torch.nn.init.normal_(parameter, std=0.5 / scaled)
            elif "lm_head" in name:
                torch.nn.init.normal_(parameter, std=0.5)
            else:
                gain = 4.0 if "o_proj" in name or "down_proj" in name else 1.0
                torch.nn.init.normal_(parameter, std=gain * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None  # tests go past it
    return model.eval()
