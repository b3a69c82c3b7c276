"""A small configuration of the same architecture: what the self-check builds.

Kept: everything that decides how the model computes, head sizes and rotary settings among it, and a few layers of each
kind. Shrunk: the number of layers and heads, widths, vocabulary, and windows, so that a dozen tokens go beyond them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from .transformers_config import GROWING_ROPES, attribute

VOCAB = 160
WINDOW = 5  # positions: what a window or a chunk is shrunk to
LAYERS = 3  # at least, where the model has them
MOST_LAYERS = 16
ORIGINAL = 8  # positions that a rotary embedding was first made for
EXPERT = 32  # width of an expert
FLOOR = 4  # positions of a step by which attention is scaled
_FLOOR = re.compile(r"^floor_scale$")
_DENSE = re.compile(r"^first_k_dense_replace$")
_WIDE = re.compile(r"intermediate|ffn|n_inner|mlp_dim|feed_forward|hidden_dim")
_EXPERT = re.compile(r"(?=.*(moe|expert|shared))(?=.*(intermediate|ffn|hidden_dim|size))")
_EXPERTS = re.compile(r"^(num_local_experts|num_experts|n_routed_experts|moe_num_experts)$")
_WINDOW = re.compile(r"^(?!.*layer).*(window|attention_chunk|chunk_length)")
_NOT_A_WIDTH = re.compile(r"position|vocab|ctx|len|token|num_|_id|factor|head_dim|rank")
_PERIOD = re.compile(r"pattern|interval|every|_step|freq|period|interleave")
_TOKEN = re.compile(r"_token_id$|_token_ids$|_id$")


def shrunk(config: Any, *, keep_windows: bool = False) -> dict[str, Any]:
    """Give the keyword arguments of a small configuration like transformers' `config`; windows stay if asked for.

    Raises:
        UnsupportedModelError: the layers have heads of different sizes.
        ValueError: the configuration does not say what is needed, or its kinds of layers do not fit into 16.
    """
    values: dict[str, Any] = config.to_dict()
    names: Mapping[str, str] = config.attribute_map
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    kv_heads = attribute(config, "num_key_value_heads") or heads
    if not isinstance(kv_heads, int) or heads % kv_heads:
        raise ValueError("the numbers of heads cannot be made smaller evenly")
    head_dim = int(attribute(config, "head_dim") or hidden // heads)
    small_kv = min(kv_heads, 2)
    small_heads = small_kv * min(heads // kv_heads, 4)
    small_hidden = small_heads * head_dim
    if hidden != heads * head_dim:
        small_hidden = -(-hidden * small_heads // (heads * 32)) * 32
    width = 2 * EXPERT if any(_EXPERTS.search(key) and value for key, value in values.items()) else 2 * small_hidden
    small = {
        key: value if keep_windows and _WINDOW.search(key) else _small(key, value, (hidden, small_hidden, width))
        for key, value in values.items()
    }
    num_layers = int(config.num_hidden_layers)
    wanted = _layers(values, num_layers)
    for key, value in values.items():
        if isinstance(value, list) and len(cast("list[Any]", value)) == num_layers:
            small[key] = value[:wanted]
    sizes = {
        "num_attention_heads": small_heads, "num_key_value_heads": small_kv, "hidden_size": small_hidden,
        "num_hidden_layers": wanted, "vocab_size": min(VOCAB, int(config.vocab_size)),
    }  # fmt: skip
    small.update({names.get(key, key): size for key, size in sizes.items() if names.get(key, key) in values})
    return {**small, "dtype": "float32"}


def _small(key: str, value: Any, widths: tuple[int, int, int]) -> Any:
    """A value of the small configuration, as far as its name says what it is.

    widths are that of the hidden states, what it is to be, and what that of the layers inside may be.
    """
    hidden, small_hidden, width = widths
    if _TOKEN.search(key):
        return _small_ids(value)
    if key == "rope_parameters" and isinstance(value, dict):
        return _small_rope(cast("dict[str, Any]", value))
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return value
    limits = (
        (_FLOOR, FLOOR), (_WINDOW, WINDOW), (_DENSE, 1), (_EXPERT, EXPERT), (_WIDE, width),
    )  # fmt: skip
    for pattern, limit in limits:
        if pattern.search(key):
            return min(value, limit)
    return small_hidden if value == hidden and not _NOT_A_WIDTH.search(key) else value


def _small_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings whose original length is short, so that what happens beyond it is seen.

    Kept where frequencies grow with the longest row's position: those models end at the original length.
    """
    small: dict[str, Any] = {
        key: _small_rope(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        for key, value in rope.items()
    }
    if small.get("original_max_position_embeddings") and small.get("rope_type") not in GROWING_ROPES:
        small["original_max_position_embeddings"] = ORIGINAL
    return small


def _small_ids(value: Any) -> Any:
    """Token ids that the small vocabulary has."""
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, VOCAB - 1)
    if isinstance(value, list):
        return [_small_ids(one) for one in cast("list[Any]", value)]
    return value


def _layers(values: Mapping[str, Any], num_layers: int) -> int:
    """How many of the first layers have one of each kind: kinds are told by lists with an entry a layer, or periods."""
    lists = [
        cast("Sequence[Any]", value)
        for value in values.values()
        if isinstance(value, list) and len(cast("list[Any]", value)) == num_layers and not _is_numbering(value)
    ]
    kinds = [repr(kind) for kind in zip(*lists, strict=True)] if lists else ["one"] * num_layers
    covering = max(kinds.index(kind) for kind in set(kinds)) + 1
    periods = [
        value
        for key, value in values.items()
        if _PERIOD.search(key) and isinstance(value, int) and not isinstance(value, bool)
    ]
    wanted = max([covering, LAYERS, *(period for period in periods if period <= MOST_LAYERS)])
    wanted = min(wanted, num_layers)
    if wanted > MOST_LAYERS:
        raise ValueError(f"one of each kind of layer needs {wanted} layers")
    return wanted


def _is_numbering(value: Any) -> bool:
    """Whether a list numbers layers, rather than say of what kind each is."""
    return value == list(range(len(value)))
