"""What each architecture's layers have that its configuration does not say, one entry for each that is taken.

The decoder is one (`models.decoder`); an entry says which of its parts an architecture uses. Read from transformers'
definition of each, which tests compare with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..kernels.gated import Activation
from .config_numbers import whole
from .errors import ModelError, UnsupportedModelError

NormPlaces = Literal["before", "after", "around"]  # of attention and feed-forward: their input's, their output's, both
QueryKeyNorms = Literal["none", "head", "row"]  # of each head, or of all heads of a row together
Windows = Literal["none", "all", "by_layer"]  # layers that see a window: none, all of them, those that layer_types says

MOST_POSITIONS = 1 << 30
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """How an architecture with a mixture of experts names things."""

    width: str  # keys of the configuration
    normalised: str  # empty: they always are
    module: str  # of the checkpoint, within a layer
    router: str = "gate"
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    stacked: bool = False  # all experts in one tensor, inputs before outputs, gate and up in turns: gate_up_proj
    biased: bool = False  # the router and every expert
    clamped: bool = False  # the activation, as swiglu_alpha and swiglu_limit say


ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture."""

    norm_places: NormPlaces = "before"
    norm_offset: bool = False  # norm weights are stored as their distance from one
    query_key_norms: QueryKeyNorms = "none"
    sinks: bool = False  # each head's softmax has a learned score more
    qkv_bias: bool | None = None  # None: as attention_bias says
    out_bias: bool | None = None  # likewise
    mlp_bias: bool | None = False  # None: as mlp_bias says
    fused: bool = False  # the checkpoint has qkv_proj and gate_up_proj in one
    windows: Windows = "none"
    rope_by_layer_type: bool = False  # rotary parameters stand under each layer type
    partial_rotary: bool = False  # a part of each head may turn
    scaled_embedding: bool = False  # by the square root of the hidden size, rounded to the activations' type
    activation_key: str = "hidden_act"
    attention_divisor_key: str = ""  # scores are divided by the root of this, not of the head size
    attention_cap: bool = False  # attn_logit_softcapping is honoured
    logits_cap: bool = False  # final_logit_softcapping is
    multipliers: bool = False  # those of embedding, attention, residual and logits are
    layers_without_rope: bool = False  # no_rope_layers is
    experts: ExpertKeys | None = None  # a mixture of them in place of each feed-forward


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=None),
    "MistralForCausalLM": Family(qkv_bias=False, out_bias=False, windows="all"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, out_bias=False, windows="by_layer"),
    "Qwen3ForCausalLM": Family(query_key_norms="head", windows="by_layer"),
    "Phi3ForCausalLM": Family(qkv_bias=False, out_bias=False, fused=True, windows="all", partial_rotary=True),
    "Gemma2ForCausalLM": Family(
        norm_places="around", norm_offset=True, windows="by_layer", scaled_embedding=True,
        activation_key="hidden_activation", attention_divisor_key="query_pre_attn_scalar", attention_cap=True,
        logits_cap=True,
    ),
    "Gemma3ForCausalLM": Family(
        norm_places="around", norm_offset=True, query_key_norms="head", windows="by_layer", rope_by_layer_type=True,
        scaled_embedding=True, activation_key="hidden_activation", attention_divisor_key="query_pre_attn_scalar",
        logits_cap=True,
    ),
    "GraniteForCausalLM": Family(mlp_bias=None, multipliers=True),
    "Olmo2ForCausalLM": Family(norm_places="after", query_key_norms="row"),
    "SmolLM3ForCausalLM": Family(mlp_bias=None, windows="by_layer", layers_without_rope=True),
    "Qwen3MoeForCausalLM": Family(
        query_key_norms="head", windows="all",
        experts=ExpertKeys("moe_intermediate_size", "norm_topk_prob", "mlp"),
    ),
    "MixtralForCausalLM": Family(
        qkv_bias=False, out_bias=False, windows="all",
        experts=ExpertKeys("intermediate_size", "", "block_sparse_moe", gate_up=("w1", "w3"), down="w2"),
    ),
    "GptOssForCausalLM": Family(
        sinks=True, windows="by_layer",
        experts=ExpertKeys(
            "intermediate_size", "", "mlp", router="router", stacked=True, biased=True, clamped=True,
        ),
    ),
}  # fmt: skip


def layer_windows(family: Family, values: Mapping[str, Any]) -> tuple[int, ...]:
    """The number of positions that each layer's queries see, their own included; 0 is all.

    Raises:
        UnsupportedModelError: a layer's type is not known, or layers have windows where the architecture has none.
        ModelError: a layer has a window of no size, or there is not one type for each layer.
    """
    num_layers, size = int(values["num_hidden_layers"]), values.get("sliding_window")
    types = list(values.get("layer_types") or ())
    unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise UnsupportedModelError("layer_types", f"Layers of type {unknown[0]!r} (layer_types) are not supported.")
    if types and len(types) != num_layers:
        raise ModelError(f"layer_types has {len(types)} entries for {num_layers} layers (num_hidden_layers).")
    if family.windows != "by_layer":
        only = "sliding_attention" if family.windows == "all" and size is not None else "full_attention"
        if any(kind != only for kind in types):
            raise UnsupportedModelError(
                "layer_types", f"Layers of other types (layer_types) than {only!r} are not supported in this model."
            )
        types = [only] * num_layers
    if size is not None and family.windows == "none":
        raise UnsupportedModelError("sliding_window", "A sliding_window is not supported by this architecture.")
    if "sliding_attention" not in types:
        return (0,) * num_layers
    if size is None:
        raise ModelError(
            "layer_types asks for a window, and sliding_window is null, or use_sliding_window false takes it away."
        )
    window = min(whole(values, "sliding_window"), MOST_POSITIONS)
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def refuse_unknown_parts(family: Family, values: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for what a filled-in configuration asks for and the decoder has not."""
    activation = values[family.activation_key]
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            family.activation_key,
            f"The activation {activation!r} ({family.activation_key}) is not supported; supported: "
            f"{', '.join(ACTIVATIONS)}.",
        )
    if values.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "use_bidirectional_attention",
            "Attention to later positions (use_bidirectional_attention) is not supported.",
        )
    if family.experts and activation != "silu":
        raise UnsupportedModelError(
            family.activation_key, f"Experts with {family.activation_key} = {activation!r} are not supported."
        )
    for key, honoured, neutral in (
        ("attn_logit_softcapping", family.attention_cap, None), ("final_logit_softcapping", family.logits_cap, None),
        ("no_rope_layers", family.layers_without_rope, None), *((key, family.multipliers, 1.0) for key in MULTIPLIERS),
    ):  # fmt: skip
        if values.get(key) not in (None, neutral) and not honoured:
            raise UnsupportedModelError(key, f"{key} is not supported by this architecture.")
    experts = () if family.experts else ("num_experts", "num_local_experts")
    for key in ("attention_sinks", "sinks", "mlp_only_layers", "use_mrope", "text_config", *experts):
        if values.get(key):
            raise UnsupportedModelError(key, f"{key} is not supported.")
