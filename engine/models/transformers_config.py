"""What a checkpoint says about a model that runs through transformers' own code, read once into one frozen type."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from ..checkpoint import tensor_shapes
from ..config import checked_dtype, eos_ids, filled_config, refuse_foreign
from ..errors import UnsupportedModelError
from ..json_file import read_json

GROWING_ROPES = ("longrope",)  # beyond their original length frequencies change, for all rows of a step at once


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """A decoder as transformers describes it. Sizes of the cache are what `self_check` has seen of its attention."""

    architecture: str
    raw: Any  # transformers' configuration, defaults filled in; never changed
    model_class: Any  # transformers' class of that name
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int  # 0 where there are none
    max_position: int  # 0 where the configuration does not say
    dtype: str  # as the checkpoint says: "float32", "bfloat16" or "float16"
    eos_token_ids: frozenset[int]
    num_parameters: int = 0  # in the checkpoint's files
    not_native: str = ""  # as `read_transformers_config` was told

    @property
    def most_positions(self) -> int:
        """The longest text that can be asked for."""
        return self.max_position

    def num_built(self, raw: Any) -> int:
        """How many numbers the model of a configuration like `raw` has, tables included; takes no memory for them."""
        with torch.device("meta"):
            outline = self.model_class._from_config(copy.deepcopy(raw))
        return sum(part.numel() for part in (*outline.parameters(), *outline.buffers()))


def read_transformers_config(model_dir: Path, not_native: str = "") -> TransformersConfig:
    """Read `config.json` and `generation_config.json` of a checkpoint for transformers' own model.

    not_native  why our own decoder does not take it, if it has the architecture: a sentence

    Raises:
        UnsupportedModelError: no decoder of transformers', or one that says nothing of its size.
        ModelError: as `config.read_model_config`.
    """
    raw = read_json(model_dir / "config.json")
    refuse_foreign(raw)
    filled = filled_config(model_dir)
    eos = eos_ids(model_dir, raw)
    architectures = cast("list[object]", raw.get("architectures") or ["none"])
    try:
        made = transformers_config(str(architectures[0]), filled, eos)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(error.feature, also_not_native(str(error), not_native)) from error
    return replace(made, not_native=not_native, num_parameters=sum(map(math.prod, tensor_shapes(model_dir).values())))


def transformers_config(architecture: str, filled: Any, eos: frozenset[int]) -> TransformersConfig:
    """Check and type a configuration of transformers', with defaults filled in. Raises as the above."""
    if filled.get_text_config(decoder=True) is not filled:
        raise _refused(architecture, "it is made of several models")
    values = filled.to_dict()
    refuse_foreign({**values, "architectures": None})
    try:
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        vocab_size, hidden_size, num_layers, num_heads = (_size(filled, name) for name in names)
        max_position = _max_position(filled)
    except UnsupportedModelError as error:
        raise _refused(architecture, str(error)) from error
    return TransformersConfig(
        architecture=architecture,
        raw=filled,
        model_class=_model_class(architecture, filled),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        max_position=max_position,
        dtype=checked_dtype(values),
        eos_token_ids=eos,
    )


def also_not_native(message: str, why: str) -> str:
    """A refusal, and why our own decoder does not take the model, if it might have."""
    return f"{message} And our own decoder does not take it: {why}" if why else message


def _model_class(architecture: str, filled: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    found = mapping[type(filled)] if type(filled) in mapping else None  # noqa: SIM401  (its `get` wants a default class)
    if found is None or isinstance(found, tuple) or found.__name__ != architecture:
        raise _refused(
            architecture,
            "transformers knows no causal language model of this name (architectures) for its configuration",
        )
    return found


def _size(filled: Any, name: str) -> int:
    """A number of the configuration, or 0 where it gives no single one."""
    value = attribute(filled, name)
    return value if isinstance(value, int) and value > 0 else 0


def attribute(filled: Any, name: str) -> Any:
    """An attribute of a configuration of transformers', None where there is none.

    Raises UnsupportedModelError where the layers do not share one, which transformers says with an error of its own.
    """
    try:
        return getattr(filled, name, None)
    except Exception as error:
        raise UnsupportedModelError(name, f"its layers differ in {name}") from error


def _max_position(filled: Any) -> int:
    """Positions that the model is made for; a rotary embedding that changes beyond some position ends there."""
    most = _size(filled, "max_position_embeddings")
    rope: Mapping[str, Any] = getattr(filled, "rope_parameters", None) or {}
    nested = [cast("Mapping[str, Any]", kind) for kind in rope.values() if isinstance(kind, dict)]
    for kind in (rope, *nested):
        if kind.get("rope_type") in GROWING_ROPES:
            most = min(most, int(kind.get("original_max_position_embeddings") or most))
    return most


def _refused(architecture: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError("architectures", f"The model's architecture ({architecture}) is not supported: {why}.")
