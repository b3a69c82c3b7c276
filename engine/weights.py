"""Loads a checkpoint's safetensors into the decoder's fused tensors.

Every name and shape is checked against the configuration from the files' headers before a byte of weights is read.
Pickles are refused: opening one runs whatever code is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..kernels.matrix import Matrix, new_matrix
from .checkpoint import Progress, is_spare, open_checkpoint, some
from .config import ModelConfig
from .errors import WeightsError

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
    router: Matrix | None  # [experts, hidden]; with it, `gate_up` and `down` are those of all experts, in order
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


def allocate(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[DecoderWeights, dict[str, torch.Tensor]]:
    """Make empty weights, and for every name in a checkpoint the view that its tensor is to be copied into.

    On the "meta" device this costs nothing and tells names, shapes and sizes.
    """
    views: dict[str, torch.Tensor] = {}

    def matrix(inputs: int, **parts: int) -> Matrix:
        """One matrix of several checkpoint tensors stacked along its outputs: name to number of outputs."""
        whole = new_matrix(sum(parts.values()), inputs, dtype, device)
        views.update(zip(parts, torch.split(whole.plain, list(parts.values())), strict=True))
        return whole

    def vector(**parts: int) -> torch.Tensor:
        """The same for vectors."""
        whole = torch.empty(sum(parts.values()), dtype=dtype, device=device)
        views.update(zip(parts, torch.split(whole, list(parts.values())), strict=True))
        return whole

    def norm(name: str, size: int) -> torch.Tensor:
        """A norm's weights: float32 as its arithmetic, so that an offset can be added without rounding."""
        views[name] = torch.empty(size, dtype=torch.float32, device=device)
        return views[name]

    new = _New(matrix, vector, norm)
    embedding = matrix(config.hidden_size, **{"model.embed_tokens.weight": config.vocab_size})
    layers = tuple(_allocate_layer(config, f"model.layers.{i}.", new) for i in range(config.num_layers))
    final_norm = norm("model.norm.weight", config.hidden_size)
    output = embedding
    if not config.tie_word_embeddings:
        output = matrix(config.hidden_size, **{"lm_head.weight": config.vocab_size})
    return DecoderWeights(embedding, layers, final_norm, output), views


@dataclass(frozen=True, slots=True)
class _New:
    """How to make weights of checkpoint tensors that are stacked: name to number of outputs."""

    matrix: Callable[..., Matrix]  # (inputs, **parts)
    vector: Callable[..., torch.Tensor]  # (**parts)
    norm: Callable[[str, int], torch.Tensor]


def _allocate_layer(config: ModelConfig, at: str, new: _New) -> LayerWeights:
    hidden, middle = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = at + "self_attn.", at + "mlp."

    def stacked(prefix: str, rows: Mapping[str, int], inputs: int, bias: bool) -> tuple[Matrix, torch.Tensor | None]:
        weight = new.matrix(inputs, **{f"{prefix}{name}.weight": count for name, count in rows.items()})
        return weight, new.vector(**{f"{prefix}{name}.bias": n for name, n in rows.items()}) if bias else None

    qkv_rows, gate_up_rows = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}, {
        "gate_proj": middle, "up_proj": middle,
    }  # fmt: skip
    if config.family.fused:
        qkv_rows, gate_up_rows = {"qkv_proj": config.qkv_size}, {"gate_up_proj": 2 * middle}
    down_rows, router = {"down_proj": hidden}, None
    if config.experts is not None and (keys := config.family.experts) is not None:
        mlp, each = f"{at}{keys.module}.", range(config.experts.count)
        gate_up_rows = {f"experts.{i}.{name}": middle for i in each for name in keys.gate_up}
        down_rows = {f"experts.{i}.{keys.down}": hidden for i in each}
        router = new.matrix(hidden, **{f"{mlp}gate.weight": config.experts.count})
    qkv, qkv_bias = stacked(attention, qkv_rows, hidden, config.qkv_bias)
    out, out_bias = stacked(attention, {"o_proj": hidden}, query, config.out_bias)
    gate_up, gate_up_bias = stacked(mlp, gate_up_rows, hidden, config.mlp_bias)
    down, down_bias = stacked(mlp, down_rows, middle, config.mlp_bias)
    return LayerWeights(
        **_allocate_norms(config, at, new),
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=out,
        out_bias=out_bias,
        router=router,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
    )


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


def _allocate_norms(config: ModelConfig, at: str, new: _New) -> dict[str, torch.Tensor | None]:
    """The norms of one layer, by their field's name."""
    fields = ("input_norm", "attended_norm", "mlp_norm", "fed_norm")
    names = zip(fields, NORM_NAMES[config.family.norm_places], strict=True)
    norms = {field: new.norm(f"{at}{name}.weight", config.hidden_size) if name else None for field, name in names}
    kind, size = config.family.query_key_norms, config.head_dim
    for field, name, heads in (("query_norm", "q_norm", config.num_heads), ("key_norm", "k_norm", config.num_kv_heads)):
        norms[field] = None
        if kind != "none":
            norms[field] = new.norm(f"{at}self_attn.{name}.weight", size * heads if kind == "row" else size)
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
        _check(config, checkpoint.shapes)
        weights, views = allocate(config, dtype, device)
        checkpoint.fill(views, progress)
    if config.family.norm_offset:
        for name, view in views.items():
            if "norm" in name:
                view.add_(1.0)
    return weights


def _check(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a checkpoint's tensors with what the configuration asks for."""
    _, views = allocate(config, torch.float32, torch.device("meta"))
    expected = {name: tuple(view.shape) for name, view in views.items()}
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
        raise WeightsError(f"The weights do not fit the configuration; {'; '.join(complaints)}.", names)
