"""What a checkpoint's own files say about the model, read once into one frozen type.

`transformers` fills in the defaults of each architecture; nothing here runs code that comes with a checkpoint. Whatever
the decoder has not been compared with is refused by name, before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from .errors import ModelError, ModelNotFoundError, UnsupportedModelError

ARCHITECTURES = ("LlamaForCausalLM",)
ROPE_KINDS = ("default", "linear", "llama3")
RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base, and how its frequencies are stretched."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this and the next two: llama3 only
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder and what its layers have."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # num_heads is a multiple of it
    head_dim: int  # even
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool  # on the query, key, value and output projections
    mlp_bias: bool
    dtype: str  # as the checkpoint says: "float32", "bfloat16" or "float16"
    eos_token_ids: frozenset[int]  # all that config.json and generation_config.json name

    @property
    def scale(self) -> float:
        """What attention scores are multiplied with."""
        return self.head_dim**-0.5

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
    if not (model_dir / "config.json").is_file():
        raise ModelNotFoundError(f"{model_dir} holds no config.json, so it is no model directory.")
    raw = read_json(model_dir / "config.json")
    _refuse_unsupported(raw)
    # transformers fills in bos and eos ids that the file never named; only what was written counts as an end
    values = {**filled_config(model_dir).to_dict(), "eos_token_id": raw.get("eos_token_id")}
    generation = model_dir / "generation_config.json"
    eos = eos_ids(values) | eos_ids(read_json(generation) if generation.is_file() else {})
    return _model_config(str(raw["architectures"][0]), values, eos)


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object. Raises ModelError where the file holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return cast("dict[str, Any]", value)


def refuse_foreign(raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for what no model may be: code of its own, quantised, or with an encoder."""
    if raw.get("auto_map"):
        raise UnsupportedModelError("auto_map", "The model brings its own code (auto_map); remote code is never run.")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise UnsupportedModelError("quantization_config", f"Quantised weights (method {method}) are not supported.")
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModelError("is_encoder_decoder", "Encoder-decoder models are not supported.")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Raise for what can be seen from `config.json` alone."""
    refuse_foreign(raw)
    architectures = cast("list[object]", raw.get("architectures") or [])
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        named = ", ".join(map(str, architectures)) or "none"
        raise UnsupportedModelError(
            "architectures",
            f"The model's architecture ({named}) is not supported; supported: {', '.join(ARCHITECTURES)}.",
        )


def filled_config(model_dir: Path) -> Any:
    """Give transformers' configuration of a checkpoint: what the file leaves out has its architecture's defaults.

    Raises ModelError where the file describes no model.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    auto: Any = AutoConfig
    try:
        return auto.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, OSError, StrictDataclassError) as error:
        said = " ".join(str(error).split())
        raise ModelError(f"{model_dir / 'config.json'} does not describe a model: {said}") from error


def eos_ids(values: Mapping[str, Any]) -> frozenset[int]:
    """All ids under `eos_token_id`: one, several or none."""
    eos = cast("int | list[int] | None", values.get("eos_token_id"))
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def checked_dtype(values: Mapping[str, Any]) -> str:
    """Give the type of a checkpoint's weights by name. Raises UnsupportedModelError."""
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModelError("dtype", f"Weights of type {dtype} are not supported.")
    return dtype


def _model_config(architecture: str, values: Mapping[str, Any], eos: frozenset[int]) -> ModelConfig:
    """Build the typed configuration and check what the decoder relies on."""
    if values["hidden_act"] != "silu":
        raise UnsupportedModelError(
            "hidden_act", f"The activation {values['hidden_act']!r} is not supported; only silu is."
        )
    num_heads, hidden_size = int(values["num_attention_heads"]), int(values["hidden_size"])
    config = ModelConfig(
        architecture=architecture,
        vocab_size=int(values["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(values["intermediate_size"]),
        num_layers=int(values["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(values["num_key_value_heads"]),
        head_dim=int(values.get("head_dim") or hidden_size // num_heads),
        max_position=int(values["max_position_embeddings"]),
        rms_norm_eps=float(values["rms_norm_eps"]),
        rope=_rope_config(values),
        tie_word_embeddings=bool(values["tie_word_embeddings"]),
        attention_bias=bool(values["attention_bias"]),
        mlp_bias=bool(values["mlp_bias"]),
        dtype=checked_dtype(values),
        eos_token_ids=eos,
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} key-value heads evenly.")
    if config.head_dim % 2:
        raise ModelError(f"A head of {config.head_dim} values cannot be rotated in pairs.")
    return config


def _rope_config(values: Mapping[str, Any]) -> RopeConfig:
    """Read the rotary embedding's parameters, in the layout that transformers 5 normalises every file to."""
    rope: Mapping[str, Any] = values.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            "rope_type", f"Rotary scaling of kind {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}."
        )
    if float(rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor", "Rotating a part of each head is not supported.")
    return RopeConfig(
        kind=kind,
        theta=float(rope.get("rope_theta") or 10_000.0),
        factor=float(rope.get("factor") or 1.0),
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        original_max_position=int(rope.get("original_max_position_embeddings") or values["max_position_embeddings"]),
    )
