"""What a checkpoint's own files say about the model, read once into one frozen type.

`transformers` fills in the defaults of each architecture; nothing here runs code that comes with a checkpoint. Whatever
the decoder has not been compared with is refused by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..kernels.gated import Activation, Clamp
from ..kernels.matrix import PANEL
from .config_culprit import culprit
from .config_numbers import number, whole
from .errors import ModelError, ModelNotFoundError, UnsupportedModelError
from .families import ACTIVATIONS, FAMILIES, ExpertKeys, Family, layer_windows, refuse_unknown_parts
from .json_file import is_file, read_json
from .kv_quantization import is_cache_only
from .mxfp4 import check_quantization, is_mxfp4
from .rope import RopeConfig, layer_ropes


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs from one layer of a decoder to another."""

    window: int = 0  # positions that a query sees, its own included; 0: all
    rope: int | None = 0  # which of the model's rotary embeddings; None: none


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts, of intermediate_size each, in every layer."""

    count: int
    top_k: int  # that each token takes
    normalised: bool  # whether a token's weights add up to one
    clamp: Clamp | None = None  # of their activation


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder and what its layers have."""

    architecture: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int  # num_heads is a multiple of it
    head_dim: int
    max_position: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerConfig, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    dtype: str  # as the checkpoint says: "float32", "bfloat16" or "float16"
    eos_token_ids: frozenset[int]  # all that config.json and generation_config.json name
    scale: float  # what attention scores are multiplied with
    soft_cap: float = 0.0  # on attention scores; 0: none
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add
    logits_divisor: float = 1.0  # of scores over the vocabulary
    logits_soft_cap: float = 0.0  # on what is left of them; 0: none
    experts: ExpertsConfig | None = None
    mxfp4: bool = False  # the experts' weights are stored in 4 bits

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def most_positions(self) -> int:
        """The longest text that can be asked for; more than `max_position` where rotary scaling begins beyond it."""
        factors = [rope.factor for rope in self.ropes if rope.kind == "dynamic"]
        return int(self.max_position * max(1.0, min(factors, default=1.0)))

    def choices(self, max_model_len: int) -> str:
        """What the longest text decides of the output of every text, in words; the same words, the same output."""
        chosen = (rope.choice(max_model_len) for rope in self.ropes)
        return ",".join(choice for choice in chosen if choice)

    @property
    def qkv_size(self) -> int:
        """Width of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read `config.json` and `generation_config.json` of a checkpoint.

    Raises:
        ModelNotFoundError: there is no such directory, or no `config.json` in it.
        UnsupportedModelError: the model needs something that is refused; `feature` names it.
        ModelError: a file is no JSON object or its values contradict each other.
    """
    if not model_dir.is_dir():
        raise ModelNotFoundError(f"There is no model directory {model_dir}.")
    if not is_file(model_dir / "config.json"):
        raise ModelNotFoundError(f"{model_dir} holds no config.json, so it is no model directory.")
    raw = read_json(model_dir / "config.json")
    _refuse_unsupported(raw)
    # transformers fills in bos and eos ids that the file never named; only what was written counts as an end
    filled = filled_config(model_dir)
    _check_kind(str(raw["architectures"][0]), str(raw.get("model_type") or filled.model_type))
    values = {**filled.to_dict(), "eos_token_id": raw.get("eos_token_id")}
    if is_mxfp4(raw):
        values |= {"quantization_config": raw["quantization_config"], "dtype": values.get("dtype") or "bfloat16"}
    eos = eos_ids(model_dir, values)
    return _model_config(str(raw["architectures"][0]), values, eos)


def _check_kind(architecture: str, model_type: str) -> None:
    """Refuse a model type of another architecture: what the file leaves out would have that one's defaults."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if names.get(model_type) != architecture:
        raise ModelError(
            f"config.json says model_type = {model_type!r} and architectures = [{architecture!r}], which do not belong "
            f"together: that type's architecture is {names.get(model_type, 'none that generates text')}."
        )


def refuse_foreign(raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for what no model may be: code of its own, quantised, or with an encoder."""
    if raw.get("auto_map", {}) != {}:  # transformers stumbles over null
        raise UnsupportedModelError(
            "auto_map",
            "The model brings its own code (auto_map in config.json); remote code is never run. Remove auto_map if the "
            "architecture is one that is supported without it.",
        )
    if raw.get("quantization_config"):
        described: object = raw["quantization_config"]
        named = cast("dict[str, Any]", described) if isinstance(described, dict) else {}
        method = named.get("quant_method", "unnamed")
        raise UnsupportedModelError(
            "quantization_config",
            f"Quantised weights (quantization_config in config.json, method {method}) are not supported.",
        )
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            "is_encoder_decoder", "Encoder-decoder models (is_encoder_decoder in config.json) are not supported."
        )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Raise for what can be seen from `config.json` alone."""
    architectures = cast("list[object]", raw.get("architectures") or [])
    family = FAMILIES.get(str(architectures[0])) if len(architectures) == 1 else None
    if family is not None and family.experts is not None and family.experts.stacked and is_mxfp4(raw):
        check_quantization(raw["quantization_config"])
        raw = {**raw, "quantization_config": None}
    if family is not None and is_cache_only(raw):
        raw = {**raw, "quantization_config": None}
    refuse_foreign(raw)
    if family is None:
        named = ", ".join(map(str, architectures)) or "none"
        raise UnsupportedModelError(
            "architectures",
            f"The model's architecture ({named}) is not supported; supported: {', '.join(FAMILIES)}.",
        )


def filled_config(model_dir: Path) -> Any:
    """Give transformers' configuration of a checkpoint: what the file leaves out has its architecture's defaults.

    Raises ModelError where the file describes no model.
    """
    from transformers import AutoConfig

    auto: Any = AutoConfig
    try:
        return auto.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever values that cannot be make transformers raise
        said, key = " ".join(str(error).split()), culprit(read_json(model_dir / "config.json"))
        without = f"; without {key} it would" if key else ""
        raise ModelError(f"{model_dir / 'config.json'} does not describe a model{without}: {said}") from error


def eos_ids(model_dir: Path, values: Mapping[str, Any]) -> frozenset[int]:
    """All ids under `eos_token_id` in a configuration's values and in the `generation_config.json` beside it."""
    generation = model_dir / "generation_config.json"
    return _eos_ids(values) | _eos_ids(read_json(generation) if generation.is_file() else {})


def _eos_ids(values: Mapping[str, Any]) -> frozenset[int]:
    """All ids under `eos_token_id`: one, several or none."""
    eos = cast("int | list[int] | None", values.get("eos_token_id"))
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def checked_dtype(values: Mapping[str, Any]) -> str:
    """Give the type of a checkpoint's weights by name. Raises UnsupportedModelError."""
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModelError("dtype", f"config.json says dtype = {dtype!r}: such weights are not supported.")
    return dtype


def _model_config(architecture: str, values: Mapping[str, Any], eos: frozenset[int]) -> ModelConfig:
    """Build the typed configuration and check what the decoder relies on."""
    family = FAMILIES[architecture]
    refuse_unknown_parts(family, values)
    num_heads, hidden_size = int(values["num_attention_heads"]), int(values["hidden_size"])
    num_kv_heads = int(values["num_key_value_heads"])
    if num_heads % num_kv_heads:
        of = f"num_key_value_heads, {num_kv_heads}"
        raise ModelError(f"config.json says num_attention_heads = {num_heads}; it must be a multiple of {of}.")
    head_dim = int(values.get("head_dim") or hidden_size // num_heads)
    windows = layer_windows(family, values)
    ropes, rope_of = layer_ropes(family, values, head_dim)

    def bias(fixed: bool | None, key: str) -> bool:
        return bool(values.get(key)) if fixed is None else fixed

    return ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=int(values["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(values[family.experts.width if family.experts else "intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=int(values["max_position_embeddings"]),
        rms_norm_eps=number(values, "rms_norm_eps", least=1e-30, most=1.0),
        ropes=ropes,
        layers=tuple(LayerConfig(window, rope) for window, rope in zip(windows, rope_of, strict=True)),
        tie_word_embeddings=bool(values["tie_word_embeddings"]),
        qkv_bias=bias(family.qkv_bias, "attention_bias"),
        out_bias=bias(family.out_bias, "attention_bias"),
        mlp_bias=bias(family.mlp_bias, "mlp_bias"),
        dtype=checked_dtype(values),
        eos_token_ids=eos,
        experts=None if family.experts is None else _experts(family.experts, values),
        mxfp4=is_mxfp4(values),
        **_scales(family, values, hidden_size, head_dim),
    )


def _experts(keys: ExpertKeys, values: Mapping[str, Any]) -> ExpertsConfig:
    """Read the mixture of experts, whose number transformers names alike for all architectures."""
    count, top_k = whole(values, "num_local_experts", "num_experts"), whole(values, "num_experts_per_tok")
    if top_k > count:
        raise ModelError(
            f"config.json says num_experts_per_tok = {top_k}; it must be at most the number of experts, {count} "
            "(num_local_experts or num_experts)."
        )
    if values.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedModelError(
            "decoder_sparse_step", "Experts in only some of the layers (decoder_sparse_step) are not supported."
        )
    for key in (keys.width, "hidden_size"):
        if int(values[key]) % PANEL:
            raise UnsupportedModelError(key, f"Experts are not supported whose {key} is no multiple of {PANEL}.")
    clamp = Clamp(number(values, "swiglu_alpha"), number(values, "swiglu_limit")) if keys.clamped else None
    return ExpertsConfig(count, top_k, not keys.normalised or bool(values[keys.normalised]), clamp)


def _scales(family: Family, values: Mapping[str, Any], hidden_size: int, head_dim: int) -> dict[str, Any]:
    """The factors, caps and the activation; what an architecture does not know leaves things as they are."""
    divisor = number(values, family.attention_divisor_key) if family.attention_divisor_key else float(head_dim)
    scales: dict[str, Any] = {
        "scale": divisor**-0.5,
        "soft_cap": number(values, "attn_logit_softcapping", 0.0),
        "activation": ACTIVATIONS[values[family.activation_key]],
        "embedding_scale": hidden_size**0.5 if family.scaled_embedding else 1.0,
        "logits_soft_cap": number(values, "final_logit_softcapping", 0.0),
    }
    if family.multipliers:
        scales["scale"] = number(values, "attention_multiplier")
        scales["embedding_scale"] = number(values, "embedding_multiplier")
        scales["residual_scale"] = number(values, "residual_multiplier")
        scales["logits_divisor"] = number(values, "logits_scaling")
    return scales
