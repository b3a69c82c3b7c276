"""Records the operations of a forward pass, for `program` to place and compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..experts import Mixture
from ..gated import ACTIVATIONS, Activation
from ..kv_cache import KvCache
from ..matrix import PANEL, Matrix
from ..rotary import Rotation
from .pointers import address, check_experts, clamp_values, is_whole_norm

ROWS_OF, NORM, PRODUCT, GATED_PRODUCT, GATE, ROTATE, ATTEND, ADD, EXPERTS = range(9)  # program.cpp has the same

CACHE_TYPES = (torch.float32, torch.bfloat16, torch.int8)  # kv_cache.h has the same


def cache_type(cache: torch.Tensor) -> int:
    """`CacheType` of a cache. Raises TypeError for another type."""
    if cache.dtype not in CACHE_TYPES:
        raise TypeError(f"the compiled CPU kernels know no cache of {cache.dtype}")
    return CACHE_TYPES.index(cache.dtype)


@dataclass(eq=False, slots=True)
class Register:
    """Stands for an activation [rows, width] while a pass is recorded."""

    width: int
    last_use: int  # number of the last operation that reads or writes it


@dataclass(slots=True)
class Recorded:
    """An operation whose buffers are not known yet."""

    fields: dict[str, int | float]
    registers: dict[str, Register]  # field name → whose buffer goes there
    kept: list[torch.Tensor] = field(default_factory=list[torch.Tensor])  # what the operation points to


class Recorder:
    """A `forward.Forward` that computes nothing."""

    def __init__(
        self, dtype: torch.dtype, cache: KvCache, tables: Sequence[torch.Tensor] = (), max_rows: int = 1
    ) -> None:
        self.dtype = dtype
        self.max_rows = max_rows
        self.cache = cache
        self.tables = tables
        self.operations: list[Recorded] = []
        self._routing = torch.empty(0, dtype=torch.int32)  # of all mixtures, one after the other

    def embedding(self, table: Matrix, scale: float = 1.0) -> Register:
        """`embedding.embedding`."""
        out = self._register(table.inputs)
        return self._add(self._matrix(ROWS_OF, table, scale), out=out)

    def rms_norm(self, x: Register, weight: torch.Tensor, eps: float) -> Register:
        """`rms_norm.rms_norm`."""
        return self._add(self._norm(x, weight, eps), x=x, out=self._register(x.width))

    def add_rms_norm(
        self, x: Register, residual: Register, weight: torch.Tensor, eps: float
    ) -> tuple[Register, Register]:
        """`rms_norm.add_rms_norm`, in place of its inputs."""
        self._add(self._norm(x, weight, eps), x=x, residual=residual, out=x, total=residual)
        return x, residual

    def add(self, x: Register, residual: Register) -> Register:
        """`rms_norm.add`, in place of the residual."""
        made = Recorded({"kind": ADD, "inputs": x.width}, {})
        return self._add(made, x=x, residual=residual, out=residual)

    def linear(self, x: Register, weight: Matrix, bias: torch.Tensor | None, scale: float = 1.0) -> Register:
        """`linear.linear`."""
        if x.width != weight.inputs:
            raise ValueError(f"a product of {x.width} values a row with a matrix of {weight.inputs} inputs")
        made = self._matrix(PRODUCT, weight, scale)
        if bias is not None:
            made.fields["bias"] = bias.data_ptr()
            made.kept.append(bias)
        return self._add(made, x=x, out=self._register(weight.outputs))

    def silu_mul(self, gate_up: Register) -> Register:
        """`gated.silu_mul`, together with the product before it where that gives whole panels of both halves."""
        return self._gated(gate_up, "silu")

    def gelu_mul(self, gate_up: Register) -> Register:
        """`gated.gelu_mul`, likewise."""
        return self._gated(gate_up, "gelu")

    def _gated(self, gate_up: Register, activation: Activation) -> Register:
        width = gate_up.width // 2
        number = ACTIVATIONS.index(activation)
        last = self.operations[-1]
        if last.registers["out"] is gate_up and last.fields["kind"] == PRODUCT and width % PANEL == 0:
            last.fields |= {"kind": GATED_PRODUCT, "activation": number}
            gate_up.width = width
            return gate_up
        made = Recorded({"kind": GATE, "outputs": width, "activation": number}, {})
        return self._add(made, x=gate_up, out=self._register(width))

    def experts(self, x: Register, scores: Register, mixture: Mixture) -> Register:
        """`experts.experts`."""
        gate_up, down, top_k = mixture.gate_up, mixture.down, mixture.top_k
        bias, down_bias = check_experts(mixture, scores.width, x.width)
        alpha, limit = clamp_values(mixture)
        made, other = self._matrix(EXPERTS, gate_up, 1.0), self._matrix(EXPERTS, down, 1.0)
        size = 3 * self.max_rows * top_k + 2 * scores.width + 1
        if len(self._routing) < size:
            self._routing = torch.zeros(size, dtype=torch.int32)
        made.fields |= {
            "down": other.fields["weight"], "down_compressed": other.fields["compressed"], "experts": scores.width,
            "top_k": top_k, "width": down.inputs, "normalised": mixture.normalised, "routing": self._routing.data_ptr(),
            "bias": bias or 0, "down_bias": down_bias or 0, "alpha": alpha, "limit": limit,
        }  # fmt: skip
        made.kept += [*other.kept, self._routing]
        made.kept += [part for part in (mixture.gate_up_bias, mixture.down_bias) if part is not None]
        rooms = {"sorted": top_k * x.width, "gated": top_k * down.inputs, "fed": top_k * x.width}
        registers = {name: self._register(width) for name, width in rooms.items()}
        return self._add(made, x=x, residual=scores, **registers, out=self._register(x.width))

    def rotate_and_store(self, qkv: Register, layer: int, how: Rotation) -> Register:
        """`rotary.rotate_and_store`."""
        kv_heads, head_dim = self.cache.kv_heads, self.cache.head_dim
        heads = qkv.width // head_dim - 2 * kv_heads
        made = self._cached(ROTATE, layer, heads)
        if how.table is not None:
            table = self.tables[how.table]
            made.fields |= {"cos_sin": address(table, torch.float32) or 0, "rotary_dim": table.shape[1]}
            made.kept.append(table)
        if (norm := how.norm) is not None:
            whole = is_whole_norm(norm, heads, kv_heads, head_dim)
            at = [address(weight, torch.float32) or 0 for weight in (norm.query, norm.key)]
            made.fields |= {"query_norm": at[0], "key_norm": at[1], "eps_or_scale": norm.eps, "whole_norm": whole}
            made.kept += [norm.query, norm.key]
        return self._add(made, x=qkv, out=self._register(heads * head_dim))

    def paged_attention(
        self,
        query: Register,
        layer: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> Register:
        """`attention.paged_attention`."""
        made = self._cached(ATTEND, layer, query.width // self.cache.head_dim)
        made.fields |= {"eps_or_scale": scale, "window": window, "soft_cap": soft_cap}
        if sinks is not None:
            made.fields["sinks"] = address(sinks, torch.float32) or 0
            made.kept.append(sinks)
        return self._add(made, x=query, out=self._register(query.width))

    def _register(self, width: int) -> Register:
        return Register(width, len(self.operations))

    def _add(self, made: Recorded, **registers: Register) -> Register:
        for register in registers.values():
            register.last_use = len(self.operations)
        made.registers |= registers
        made.fields["bf16"] = self.dtype == torch.bfloat16
        self.operations.append(made)
        return registers["out"]

    def _matrix(self, kind: int, matrix: Matrix, scale: float) -> Recorded:
        if not matrix.in_panels or matrix.dtype != self.dtype:
            raise TypeError(f"expected a {self.dtype} matrix in panels, got {matrix.dtype}")
        if matrix.compressed and kind not in (PRODUCT, EXPERTS):
            raise TypeError("expected a matrix in whole panels, got a compressed one")
        fields = {"kind": kind, "weight": matrix.values.data_ptr(), "inputs": matrix.inputs, "outputs": matrix.outputs}
        return Recorded({**fields, "compressed": matrix.compressed, "eps_or_scale": scale}, {}, [matrix.values])

    def _norm(self, x: Register, weight: torch.Tensor, eps: float) -> Recorded:
        if weight.dtype != torch.float32 or weight.shape != (x.width,):
            raise TypeError(f"expected {x.width} float32 weights, got {weight.dtype} {tuple(weight.shape)}")
        fields = {"kind": NORM, "weight": weight.data_ptr(), "inputs": x.width}
        return Recorded({**fields, "eps_or_scale": eps}, {}, [weight])

    def _cached(self, kind: int, layer: int, heads: int) -> Recorded:
        keys, values = self.cache.layer(layer)
        fields = {
            "kind": kind, "k_cache": keys.data_ptr(), "v_cache": values.data_ptr(), "heads": heads,
            "kv_heads": self.cache.kv_heads, "head_dim": self.cache.head_dim, "block_size": keys.shape[1],
            "cache_type": cache_type(keys), "group": self.cache.places[layer][0],
        }  # fmt: skip
        return Recorded({**fields}, {}, list(self.cache.groups))
