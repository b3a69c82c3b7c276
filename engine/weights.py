"""Loads a checkpoint's safetensors into the decoder's fused tensors.

Every name and shape is checked against the configuration from the files' headers before a byte of weights is read.
Pickles are refused: opening one runs whatever code is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..kernels.matrix import Matrix
from .checkpoint import EMBEDDING, OUTPUT, Progress, hint, is_spare, open_checkpoint, some
from .config import ModelConfig
from .errors import WeightsError
from .expert_weights import expert_weights
from .new_weights import NewWeights
from .tensor_copy import Place

Form = Callable[[Matrix], Matrix]  # gives a matrix in another form


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections are [outputs, inputs], as torch's `linear` takes them; a bias is None if there is none."""

    input_norm: torch.Tensor | None  # this and the next three float32 [hidden]: of what goes into attention,
    attended_norm: torch.Tensor | None  # of what comes out of it,
    mlp_norm: torch.Tensor | None  # of what goes into the feed-forward,
    fed_norm: torch.Tensor | None  # and of what comes out of it
    query_norm: torch.Tensor | None  # float32 [head_dim], or [heads·head_dim]
    key_norm: torch.Tensor | None  # float32 [head_dim], or [kv_heads·head_dim]
    qkv: Matrix  # [(heads + 2·kv_heads)·head_dim, hidden]
    qkv_bias: torch.Tensor | None
    out: Matrix  # [hidden, heads·head_dim]
    out_bias: torch.Tensor | None
    sinks: torch.Tensor | None  # float32 [heads]
    router: Matrix | None  # [experts, hidden]; with it, the following are those of all experts, in order
    router_bias: torch.Tensor | None
    gate_up: Matrix  # [2·intermediate, hidden], the gate's rows first
    gate_up_bias: torch.Tensor | None
    down: Matrix  # [hidden, intermediate]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder on one device; all of one dtype but the norms, which are float32."""

    embedding: Matrix  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # float32 [hidden]
    output: Matrix  # [vocab, hidden]; the embedding itself where they are tied

    @property
    def num_bytes(self) -> int:
        """Memory that the weights take."""
        parts = [part for layer in self.layers for part in _fields(layer)]
        matrices = [part for part in (self.embedding, *parts) if isinstance(part, Matrix)]
        matrices += [] if self.output is self.embedding else [self.output]
        vectors = [part for part in (self.final_norm, *parts) if isinstance(part, torch.Tensor)]
        return sum(matrix.num_bytes for matrix in matrices) + sum(vector.nbytes for vector in vectors)

    def packed(self, pack: Form, compressed: Form | None = None, screened: Form | None = None) -> DecoderWeights:
        """The same weights with every matrix as `pack` gives it, which may take the place of its argument.

        After that, those of the layers are as `compressed` gives them, and the output matrix as `screened` does.
        """

        def for_products(matrix: Matrix) -> Matrix:
            return pack(matrix) if compressed is None else compressed(pack(matrix))

        embedding = pack(self.embedding)
        layers = tuple(replace(layer, **_packed_fields(layer, for_products)) for layer in self.layers)
        output = embedding if self.output is self.embedding else pack(self.output)
        if screened is not None:
            output = screened(output)
        if self.output is self.embedding:
            embedding = output
        return DecoderWeights(embedding, layers, self.final_norm, output)


def _fields(layer: LayerWeights) -> tuple[Matrix | torch.Tensor | None, ...]:
    return tuple(getattr(layer, name) for name in LayerWeights.__slots__)


def _packed_fields(layer: LayerWeights, pack: Form) -> dict[str, Any]:
    pairs = zip(LayerWeights.__slots__, _fields(layer), strict=True)
    return {name: pack(part) for name, part in pairs if isinstance(part, Matrix)}


def allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[DecoderWeights, dict[str, Place]]:
    """Make empty weights, and for every name in a checkpoint the place that its tensor is to be copied into.

    On the "meta" device this costs nothing and tells names, shapes and sizes.
    """
    new = NewWeights(dtype, device)
    embedding = new.matrix(config.hidden_size, **{EMBEDDING: config.vocab_size})
    layers = tuple(_allocate_layer(config, f"model.layers.{i}.", new) for i in range(config.num_layers))
    final_norm = new.float_vector("model.norm.weight", config.hidden_size)
    output = embedding
    if not config.tie_word_embeddings:
        output = new.matrix(config.hidden_size, **{OUTPUT: config.vocab_size})
    return DecoderWeights(embedding, layers, final_norm, output), new.places


def _allocate_layer(config: ModelConfig, at: str, new: NewWeights) -> LayerWeights:
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = f"{at}self_attn."
    qkv_rows = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    if config.family.fused:
        qkv_rows = {"qkv_proj": config.qkv_size}
    qkv, qkv_bias = new.module(attention, qkv_rows, config.hidden_size, config.qkv_bias)
    out, out_bias = new.module(attention, {"o_proj": config.hidden_size}, query, config.out_bias)
    sinks = new.float_vector(f"{attention}sinks", config.num_heads) if config.family.sinks else None
    if config.experts is not None and (keys := config.family.experts) is not None:
        fed = expert_weights(config, config.experts, keys, at, new)
    else:
        fed = _feed_forward(config, f"{at}mlp.", new)
    return LayerWeights(
        **_allocate_norms(config, at, new),
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=out,
        out_bias=out_bias,
        sinks=sinks,
        **fed,
    )


def _feed_forward(config: ModelConfig, at: str, new: NewWeights) -> dict[str, Any]:
    """The gated feed-forward of a layer, by field."""
    middle = config.intermediate_size
    rows = {"gate_up_proj": 2 * middle} if config.family.fused else {"gate_proj": middle, "up_proj": middle}
    gate_up, gate_up_bias = new.module(at, rows, config.hidden_size, config.mlp_bias)
    down, down_bias = new.module(at, {"down_proj": config.hidden_size}, middle, config.mlp_bias)
    fields = {"gate_up": gate_up, "gate_up_bias": gate_up_bias, "down": down, "down_bias": down_bias}
    return {"router": None, "router_bias": None, **fields}


NORM_NAMES = {  # those of each place, for `input_norm`, `attended_norm`, `mlp_norm` and `fed_norm`
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


def _allocate_norms(config: ModelConfig, at: str, new: NewWeights) -> dict[str, torch.Tensor | None]:
    """The norms of one layer, by their field's name."""
    fields = ("input_norm", "attended_norm", "mlp_norm", "fed_norm")
    names = zip(fields, NORM_NAMES[config.family.norm_places], strict=True)
    hidden, kind, size = config.hidden_size, config.family.query_key_norms, config.head_dim
    norms = {field: new.float_vector(f"{at}{name}.weight", hidden) if name else None for field, name in names}
    for field, name, heads in (("query_norm", "q_norm", config.num_heads), ("key_norm", "k_norm", config.num_kv_heads)):
        norms[field] = None
        if kind != "none":
            length = size * heads if kind == "row" else size
            norms[field] = new.float_vector(f"{at}self_attn.{name}.weight", length)
    return norms


def load_weights(
    model_dir: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> DecoderWeights:
    """Load a checkpoint, converting to `dtype` on the way.

    Raises:
        UnsupportedModelError: there are only pickles.
        WeightsError: tensors are missing, unexpected, of another shape or type, or a file is damaged.
    """
    with open_checkpoint(model_dir) as checkpoint:
        found = checkpoint.shapes
        _check(config, found)
        weights, places = _allocated(config, dtype, device, found)
        checkpoint.fill(places, progress)
    if config.family.norm_offset:
        for name, place in places.items():
            if "norm" in name:
                place.view.add_(1.0)
    return weights


def _allocated(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, found: Collection[str]
) -> tuple[DecoderWeights, dict[str, Place]]:
    """`allocate` for a checkpoint with these tensors: of two that are tied it may have either."""
    weights, places = allocate(config, dtype, device)
    if config.tie_word_embeddings and EMBEDDING not in found and OUTPUT in found:
        places[OUTPUT] = places.pop(EMBEDDING)
    return weights, places


def _check(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a checkpoint's tensors with what the configuration asks for."""
    _, places = _allocated(config, torch.float32, torch.device("meta"), found)
    expected = {name: place.shape for name, place in places.items()}
    expected |= {place.scales: place.shape[:-1] for place in places.values() if place.scales}
    missing = [name for name in expected if name not in found]
    tied = config.tie_word_embeddings
    unexpected = [name for name in found if name not in expected and not is_spare(name, tied=tied)]
    wrong = [name for name in expected if name in found and found[name] != expected[name]]
    complaints: list[str] = []
    if missing:
        complaints.append(f"missing: {some(missing)}")
    if unexpected:
        complaints.append(f"unexpected: {some(unexpected)}")
    if wrong:
        shapes = [f"{name} is {list(found[name])} instead of {list(expected[name])}" for name in wrong]
        complaints.append(f"of another shape: {some(shapes)}")
    if complaints:
        names = tuple(missing + unexpected + wrong)
        said = f"The weights do not fit the configuration; {'; '.join(complaints)}.{hint(missing, tied=tied)}"
        raise WeightsError(said, names)
