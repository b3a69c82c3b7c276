"""What well-known checkpoints say of themselves, with two layers, a small vocabulary and a narrow feed-forward.

Everything that decides how positions are seen is as published: heads and their size, rotary embedding, windows, caps.
"""

from __future__ import annotations

from typing import Any

_SHORT = (
    "1.05 1.05 1.05 1.1 1.1 1.1 1.25 1.25 1.4 1.45 1.55 1.85 1.9 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2.1 2.1 2.2 "
    "2.35 2.35 2.35 2.35 2.4 2.4 2.65 2.7 2.9 2.95 3.05 3.05 3.05"
)
_LONG = (
    "1.03 1.05 1.05 1.08 1.23 1.23 1.3 1.45 1.6 1.65 1.9 2.86 3.69 5.42 5.49 5.49 9.09 11.58 15.66 15.77 15.79 18.36 "
    "21.99 23.08 30.01 32.35 32.59 35.56 39.95 53.84 56.2 57.95 59.29 59.77 59.92 61.19 61.96 62.5 63.37 63.48 63.48 "
    "63.66 63.85 64.08 64.76 64.8 64.81 64.81"
)
_SMALL: dict[str, Any] = {
    "vocab_size": 320, "intermediate_size": 256, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None, "dtype": "float32",
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "max_position_embeddings": 131_072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_key_value_heads": 8,
    "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 150_000, "sliding_window": 128, "swiglu_limit":
    7.0, "tie_word_embeddings": False, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type":
        "yarn", "truncate": False,
    },
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {  # name → its config.json
    "Llama-3.1-8B": {
        **_SMALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size":
        4096, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps":
        1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": False, "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Qwen2.5-7B": {
        **_SMALL, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size":
        3584, "max_position_embeddings": 131_072, "max_window_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "sliding_window": 131_072,
        "tie_word_embeddings": False, "use_mrope": False, "use_sliding_window": False,
    },
    "Gemma-2-9B": {
        **_SMALL, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act":
        "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "max_position_embeddings":
        8192, "num_attention_heads": 16, "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0, "sliding_window": 4096, "sliding_window_size": 4096, "cache_implementation": "hybrid",
    },
    "Phi-3-mini-128k": {
        **_SMALL, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "hidden_act":
        "silu", "hidden_size": 3072, "max_position_embeddings": 131_072, "num_attention_heads": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta":
        10_000.0, "sliding_window": 262_144, "tie_word_embeddings": False, "rope_scaling": {
            "type": "longrope", "short_factor": [float(x) for x in _SHORT.split()], "long_factor":
            [float(x) for x in _LONG.split()],
        },
    },
    "Mistral-7B-v0.1": {
        **_SMALL, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size":
        4096, "max_position_embeddings": 32_768, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps":
        1e-5, "rope_theta": 10_000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    },
    "Qwen3-8B": {
        **_SMALL, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim":
        128, "hidden_act": "silu", "hidden_size": 4096, "max_position_embeddings": 40_960, "max_window_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta":
        1_000_000, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
    },
    "Gemma-3-4B": {  # its text; one layer of each kind
        **_SMALL, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560, "max_position_embeddings":
        131_072, "num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10_000.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta":
        1_000_000.0, "sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"],
    },
    "Granite-3.1-8B": {
        **_SMALL, "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_bias": False,
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 4096,
        "logits_scaling": 16.0, "max_position_embeddings": 131_072, "mlp_bias": False, "num_attention_heads": 32,
        "num_key_value_heads": 8, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 10_000_000.0, "tie_word_embeddings": True,
    },
    "OLMo-2-7B": {
        **_SMALL, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False, "hidden_act":
        "silu", "hidden_size": 4096, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_key_value_heads":
        32, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500_000, "tie_word_embeddings": False,
    },
    "SmolLM3-3B": {  # one layer of each kind
        **_SMALL, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False,
        "hidden_act": "silu", "hidden_size": 2048, "max_position_embeddings": 65_536, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2,
        "num_attention_heads": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta":
        5_000_000.0, "sliding_window": None, "use_sliding_window": False,
    },
    "Qwen3-30B-A3B": {  # fewer and narrower experts
        **_SMALL, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "max_position_embeddings":
        40_960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 64, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 8, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1_000_000.0, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False,
    },
    "Mixtral-8x7B": {
        **_SMALL, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "hidden_size":
        4096, "max_position_embeddings": 32_768, "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
        "sliding_window": None, "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {  # one layer of each kind; fewer and narrower experts
        **_SMALL, **_GPT_OSS, "intermediate_size": 64, "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 8,
    },
}  # fmt: skip
FULL_SIZES: dict[str, dict[str, int]] = {  # name → what is narrowed above, as published
    "Llama-3.1-8B": {"vocab_size": 128_256, "intermediate_size": 14_336},
    "Mistral-7B-v0.1": {"vocab_size": 32_000, "intermediate_size": 14_336},
    "Qwen2.5-7B": {"vocab_size": 152_064, "intermediate_size": 18_944},
    "Qwen3-8B": {"vocab_size": 151_936, "intermediate_size": 12_288},
    "Phi-3-mini-128k": {"vocab_size": 32_064, "intermediate_size": 8192},
    "Gemma-2-9B": {"vocab_size": 256_000, "intermediate_size": 14_336},
    "Gemma-3-4B": {"vocab_size": 262_208, "intermediate_size": 10_240},
    "Granite-3.1-8B": {"vocab_size": 49_155, "intermediate_size": 12_800},
    "OLMo-2-7B": {"vocab_size": 100_352, "intermediate_size": 11_008},
    "SmolLM3-3B": {"vocab_size": 128_256, "intermediate_size": 11_008},
    "Qwen3-30B-A3B": {
        "vocab_size": 151_936, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    },
    "Mixtral-8x7B": {"vocab_size": 32_000, "intermediate_size": 14_336, "num_local_experts": 8},
    "gpt-oss-20b": {"vocab_size": 201_088, "intermediate_size": 2880, "num_local_experts": 32},
}  # fmt: skip
_FULL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16"}
WHOLE: dict[str, dict[str, Any]] = {  # name → what its config.json says, for its reading alone
    "Mistral-7B-v0.1": {
        **_FULL, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size":
        4096, "intermediate_size": 14_336, "max_position_embeddings": 32_768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32_000,
    },
    "Gemma-3-1B": {
        **_FULL, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
        "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim":
        256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32_768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10_000, "rope_scaling": None,
        "rope_theta": 1_000_000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262_144,
    },
    "SmolLM3-3B": {
        **_FULL, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11_008, "max_position_embeddings": 65_536,
        "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
        "layer_types": ["full_attention"] * 36, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5_000_000.0,
        "sliding_window": None, "use_sliding_window": False, "vocab_size": 128_256,
    },
    "Qwen3-30B-A3B": {
        **_FULL, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size":
        6144, "max_position_embeddings": 40_960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 1_000_000.0, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151_936,
    },
    "Granite-3.1-2B": {
        **_FULL, "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_bias": False,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "logits_scaling": 8.0, "max_position_embeddings": 131_072, "mlp_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 5_000_000.0, "tie_word_embeddings": True,
        "vocab_size": 49_155,
    },
    "gpt-oss-20b": {
        **_GPT_OSS, "eos_token_id": 200_002, "pad_token_id": 199_999, "intermediate_size": 2880, "layer_types":
        ["sliding_attention", "full_attention"] * 12, "num_hidden_layers": 24, "num_local_experts": 32,
        "router_aux_loss_coef": 0.9, "use_cache": True, "vocab_size": 201_088, "quantization_config": {
            "quant_method": "mxfp4", "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    },
}  # fmt: skip
