"""A small configuration of the same architecture: what the self-check builds.

Kept: everything that decides how the model computes, head sizes and rotary settings among it, and a few layers of each
kind. Shrunk: the numbers of layers, heads, experts and positions, widths, vocabulary, and windows, so that a dozen
tokens go beyond them.
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
EXPERTS = 8  # of a layer, at least, where the model has them
POSITIONS = 512  # of tables that have one row for each
WIDTH = 512  # of the layers inside, at most
LARGE_HEAD = 128  # from this head size on, there are fewer heads
FLOOR = 4  # positions of a step by which attention is scaled
_FLOOR = re.compile(r"^floor_scale$")
_DENSE = re.compile(r"^first_k_dense_replace$")
_WIDE = re.compile(r"intermediate|ffn|n_inner|mlp_dim|feed_forward|hidden_dim")
_EXPERT = re.compile(r"(?=.*(moe|expert|shared))(?=.*(intermediate|ffn|hidden_dim|size))")
_EXPERTS = re.compile(r"^(num_local_experts|num_experts|n_routed_experts|moe_num_experts)$")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_POSITIONS = re.compile(
    r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length|max_target_positions"
    r"|num_position_embeddings|position_embedding_size)$"
)
_WINDOW = re.compile(r"^(?!.*layer).*(window|attention_chunk|chunk_length)")
_NOT_A_WIDTH = re.compile(r"position|vocab|ctx|len|token|num_|_id|factor|head_dim|rank")
_PERIOD = re.compile(r"pattern|interval|every|_step|freq|period|interleave")
_INSIDE = re.compile(r"_config$")
_DEPTH = re.compile(r"^(num_hidden_layers|num_layers|num_blocks|depth|encoder_layers|n_layers?)$")
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
    small_heads = small_kv * min(heads // kv_heads, 4 if head_dim < LARGE_HEAD else 2)
    small_hidden = small_heads * head_dim
    if hidden != heads * head_dim:
        small_hidden = -(-hidden * small_heads // (heads * 32)) * 32
    has_experts = any(_EXPERTS.search(key) and value for key, value in values.items())
    width = 2 * EXPERT if has_experts else min(2 * small_hidden, WIDTH)
    small = {
        key: value if keep_windows and _WINDOW.search(key) else _small(key, value, (hidden, small_hidden, width))
        for key, value in values.items()
    }
    small.update(_small_tables(values))
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
    if _INSIDE.search(key) and isinstance(value, dict):  # of another model, beside the text's and unused by it
        inside = cast("dict[str, Any]", value)
        return {
            name: min(size, 2) if _DEPTH.search(name) and _above(size, 2) else size for name, size in inside.items()
        }
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return value
    limits = (
        (_FLOOR, FLOOR), (_WINDOW, WINDOW), (_DENSE, 1), (_EXPERT, EXPERT), (_WIDE, width),
    )  # fmt: skip
    for pattern, limit in limits:
        if pattern.search(key):
            return min(value, limit)
    return small_hidden if value == hidden and not _NOT_A_WIDTH.search(key) else value


def _small_tables(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of experts and of positions that are to be smaller.

    Experts stay so many that each token's fit into the groups that are chosen. Positions stay where frequencies follow
    from them, and experts where the configuration does not say how many a token has.
    """
    small: dict[str, Any] = {}
    if not _grows(values.get("rope_parameters")):
        small = {key: POSITIONS for key, value in values.items() if _POSITIONS.search(key) and _above(value, POSITIONS)}
    chosen = [int(values[name]) for name in _CHOSEN if _above(values.get(name), 0)]
    if chosen:
        groups = int(values.get("n_group") or 1)
        of_these = int(values.get("topk_group") or groups)
        each = max(2, -(-max(chosen) // of_these), -(-max(EXPERTS, 2 * max(chosen)) // groups))
        few = each * groups
        small.update({key: few for key, value in values.items() if _EXPERTS.search(key) and _above(value, few)})
    return small


def _grows(rope: Any) -> bool:
    """Whether frequencies grow with positions, for one kind of layer at least."""
    if not isinstance(rope, dict):
        return False
    kinds = cast("dict[str, Any]", rope)
    return kinds.get("rope_type") in GROWING_ROPES or any(_grows(kind) for kind in kinds.values())


def _above(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > least


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
