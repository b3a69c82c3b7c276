"""What a configuration says of rotary position embedding, read into one frozen type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from .config_numbers import flag, number
from .errors import ModelError, UnsupportedModelError
from .families import Family

RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base, and how its frequencies are stretched."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this and the next: llama3 only
    high_freq_factor: float = 4.0
    original_max_position: int = 0  # not for default and linear
    beta_fast: float = 32.0  # this and the next two: yarn only
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # this and the next: longrope only, rotary_dim / 2 of them
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0  # what cosines and sines are multiplied with
    rotated: float = 1.0  # the part of each head that turns, its first values

    def rotary_dim(self, head_dim: int) -> int:
        """How many values of a head turn."""
        return int(head_dim * self.rotated)

    def choice(self, max_len: int) -> str:
        """What the longest text decides, in words; empty where it decides nothing."""
        if self.kind == "longrope":
            return "short factors" if max_len <= self.original_max_position else "long factors"
        return f"stretched for {max_len}" if self.kind == "dynamic" and max_len > self.original_max_position else ""


def layer_ropes(
    family: Family, values: Mapping[str, Any], head_dim: int
) -> tuple[tuple[RopeConfig, ...], tuple[int | None, ...]]:
    """Give the rotary embeddings of a model, and for each layer which of them it has; None is none.

    `values` are in the layout that transformers 5 normalises every file to. Raises UnsupportedModelError, ModelError.
    """
    num_layers, rope = int(values["num_hidden_layers"]), cast("dict[str, Any]", values.get("rope_parameters") or {})
    if family.rope_by_layer_type:
        types = cast("list[str]", values["layer_types"])
        names = sorted(set(types))
        if lacking := [name for name in names if not isinstance(rope.get(name), Mapping)]:
            raise ModelError(f"config.json has no object under {lacking[0]} in rope_parameters.")
        if any("truncate" in rope[name] for name in names):  # transformers looks for it elsewhere
            raise UnsupportedModelError("truncate", "truncate under a layer type's rotary parameters is not supported.")
        tables = tuple(_rope_config(family, values, rope[name], head_dim) for name in names)
        return tables, tuple(names.index(kind) for kind in types)
    if inner := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise UnsupportedModelError(
            "rope_parameters",
            f"Rotary parameters for each layer type (rope_parameters.{inner[0]}) are not supported in this model.",
        )
    listed: object = values.get("no_rope_layers")  # those that have it as well
    has_rope = [1] * num_layers if listed is None else cast("list[int]", listed)
    if len(has_rope) < num_layers:
        raise ModelError(f"no_rope_layers has {len(has_rope)} entries for {num_layers} layers.")
    return (_rope_config(family, values, rope, head_dim),), tuple(0 if on else None for on in has_rope[:num_layers])


def _rope_config(family: Family, values: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int) -> RopeConfig:
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str):
        raise ModelError(f"Rotary scaling of kind {kind!r}: rope_type in config.json must be a name.")
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            "rope_type",
            f"Rotary scaling of kind {kind!r} (rope_type) is not supported; supported: {', '.join(ROPE_KINDS)}.",
        )
    beside = number(values, "partial_rotary_factor", 1.0, least=0.0, most=1.0)  # some read it there
    rotated = number(rope, "partial_rotary_factor", beside, least=0.0, most=1.0)
    if rotated != 1.0 and not family.partial_rotary:
        raise UnsupportedModelError(
            "partial_rotary_factor",
            "Rotating a part of each head (partial_rotary_factor) is not supported by this architecture.",
        )
    max_position = int(values["max_position_embeddings"])
    # dynamic scaling begins at the configuration's own length, whatever else it names
    original = max_position if kind == "dynamic" else _original(values, rope, max_position)
    stretch = {"default": 1.0, "yarn": max_position / original, "longrope": max_position / original}
    factor = number(rope, "factor", stretch.get(kind))
    low, high = (None, None) if kind == "llama3" else (1.0, 4.0)
    made = RopeConfig(
        kind=kind,
        theta=number(rope, "rope_theta"),
        factor=factor,
        low_freq_factor=number(rope, "low_freq_factor", low),
        high_freq_factor=number(rope, "high_freq_factor", high),
        original_max_position=original,
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        truncate=flag(rope, "truncate", True),
        short_factor=_numbers(rope, "short_factor"),
        long_factor=_numbers(rope, "long_factor"),
        attention_factor=_attention_factor(kind, factor, original, rope),
        rotated=rotated,
    )
    _check(made, head_dim)
    return made


def _attention_factor(kind: RopeKind, factor: float, original: int, rope: Mapping[str, Any]) -> float:
    """What cosines and sines are multiplied with: what the file says, or what the kind's paper does."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor", 1.0)
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":  # https://arxiv.org/abs/2402.13753
        return math.sqrt(1.0 + math.log(factor) / math.log(original))
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scale, scale_all = number(rope, "mscale", 1.0), number(rope, "mscale_all_dim", 1.0)
        return (0.1 * scale * math.log(factor) + 1.0) / (0.1 * scale_all * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0


def _numbers(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """A list of them; empty if there is none."""
    listed: object = rope.get(key) or ()
    if not isinstance(listed, list | tuple):
        raise ModelError(f"config.json says {key} {listed!r} for the rotary embedding; it must be a list of numbers.")
    return tuple(number({key: value}, key) for value in cast("list[object]", listed))


def _original(values: Mapping[str, Any], rope: Mapping[str, Any], max_position: int) -> int:
    """The length that the model was made for before it was stretched: what stands beside the parameters comes first."""
    key = "original_max_position_embeddings"
    length = number(values if values.get(key) is not None else rope, key, max_position)
    if length < 2 or length != int(length):
        raise ModelError(f"config.json says {key} = {length:g}; it must be a whole number above 1.")
    return int(length)


def _check(rope: RopeConfig, head_dim: int) -> None:
    if rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ModelError(
            f"low_freq_factor {rope.low_freq_factor} must be below high_freq_factor {rope.high_freq_factor}."
        )
    if rope.theta <= 1.0:
        raise ModelError(f"config.json says rope_theta = {rope.theta:g}; it must be above 1.")
    rotary_dim = rope.rotary_dim(head_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelError(
            f"{rotary_dim} values of a head of {head_dim} cannot be rotated in pairs: head_dim (or hidden_size by "
            "num_attention_heads) times partial_rotary_factor must be an even number."
        )
    if rope.kind == "longrope":
        for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
            if len(factors) != rotary_dim // 2:
                raise ModelError(
                    f"{name} has {len(factors)} entries; it must have {rotary_dim // 2}, half of head_dim (or "
                    "hidden_size by num_attention_heads) times partial_rotary_factor."
                )
