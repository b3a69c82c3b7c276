"""The operations that a model's forward pass is made of, apart from what they are done on.

A model describes its pass once, as calls of `Forward`. Done on tensors, the calls compute at once (`Immediate`); done
on a recorder's registers, they are kept as a program that computes the same later in one call (`cpu.program`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from .embedding import Asked, Scores
from .experts import Mixture
from .kv_cache import KvCache, Placement
from .matrix import Matrix
from .rotary import Rotation

if TYPE_CHECKING:
    from .backend import Backend

T = TypeVar("T")


class Inputs(Protocol):
    """What one step is computed from; see `engine.batch.Batch`."""

    @property
    def num_rows(self) -> int:
        """Rows of every activation."""
        ...

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 [num_rows]."""
        ...

    @property
    def positions(self) -> torch.Tensor:
        """int64 [num_rows]."""
        ...

    @property
    def placements(self) -> Sequence[Placement]:
        """Rows and blocks of the sequences, in each group of the cache."""
        ...


class Forward(Protocol[T]):
    """Operations on whatever stands for activations [rows, width]. Each is described in the file of its name.

    What changes from step to step, the cache and the rotary tables belong to whoever does the operations.
    """

    def embedding(self, table: Matrix, scale: float = 1.0) -> T:
        """Give the rows of the step's token ids, times `scale`."""
        ...

    def rms_norm(self, x: T, weight: torch.Tensor, eps: float) -> T:
        """Norm."""
        ...

    def add_rms_norm(self, x: T, residual: T, weight: torch.Tensor, eps: float) -> tuple[T, T]:
        """Norm of a sum, and the sum; neither `x` nor `residual` is used again."""
        ...

    def add(self, x: T, residual: T) -> T:
        """Sum; neither `x` nor `residual` is used again."""
        ...

    def linear(self, x: T, weight: Matrix, bias: torch.Tensor | None, scale: float = 1.0) -> T:
        """Product, times `scale`."""
        ...

    def silu_mul(self, gate_up: T) -> T:
        """Gated activation; `gate_up` is not used again."""
        ...

    def gelu_mul(self, gate_up: T) -> T:
        """The other one; `gate_up` is not used again."""
        ...

    def experts(self, x: T, scores: T, mixture: Mixture) -> T:
        """Mixture of experts, of what a router's product scores."""
        ...

    def rotate_and_store(self, qkv: T, layer: int, how: Rotation) -> T:
        """Norm and rotate queries and keys, write keys and values into the layer's cache, give the queries."""
        ...

    def paged_attention(
        self,
        query: T,
        layer: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> T:
        """Attention over the layer's cache."""
        ...


class Describe(Protocol):
    """A model's pass: from the step's token ids to hidden states."""

    def __call__(self, ops: Forward[T]) -> T:
        """Call the operations; give the hidden states [rows, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step gave; valid until the next one begins."""

    hidden: torch.Tensor  # [num_rows, hidden]
    finite: torch.Tensor | bool  # whether all of it is; a tensor where asking would be waiting for a device
    scores: Scores | None  # of the rows that were asked for, if any were


Finish = Callable[[], Computed]  # waits until the step is computed
Begin = Callable[[Inputs, Asked | None], Finish]  # begins a step; the one before must be finished


class Immediate:
    """A `Forward` on tensors for one step.

    `tables` are the rotary tables.
    """

    def __init__(self, backend: Backend, inputs: Inputs, cache: KvCache, tables: Sequence[torch.Tensor]) -> None:
        self._ops = backend
        self._inputs = inputs
        self._cache = cache
        self._tables = tables

    def embedding(self, table: Matrix, scale: float = 1.0) -> torch.Tensor:
        """`embedding.embedding`."""
        return self._ops.embedding(self._inputs.token_ids, table, scale)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`rms_norm.rms_norm`."""
        return self._ops.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rms_norm.add_rms_norm`."""
        return self._ops.add_rms_norm(x, residual, weight, eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`rms_norm.add`."""
        return self._ops.add(x, residual)

    def linear(self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, scale: float = 1.0) -> torch.Tensor:
        """`linear.linear`."""
        return self._ops.linear(x, weight, bias, scale)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gated.silu_mul`."""
        return self._ops.silu_mul(gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gated.gelu_mul`."""
        return self._ops.gelu_mul(gate_up)

    def experts(self, x: torch.Tensor, scores: torch.Tensor, mixture: Mixture) -> torch.Tensor:
        """`experts.experts`."""
        return self._ops.experts(x, scores, mixture)

    def rotate_and_store(self, qkv: torch.Tensor, layer: int, how: Rotation) -> torch.Tensor:
        """`rotary.rotate_and_store`, as [rows, heads·head_dim]."""
        keys, values = self._cache.layer(layer)
        table = None if how.table is None else self._tables[how.table]
        slots = self._placement(layer).slots
        query = self._ops.rotate_and_store(
            qkv, self._inputs.positions, table, keys, values, slots, how.norm, self._cache.layer_scales(layer)
        )
        return query.flatten(1)

    def paged_attention(
        self,
        query: torch.Tensor,
        layer: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`attention.paged_attention`, on [rows, heads·head_dim]."""
        keys, values = self._cache.layer(layer)
        heads = query.view(len(query), -1, self._cache.head_dim)
        paging = self._placement(layer).paging
        scales = self._cache.layer_scales(layer)
        return self._ops.paged_attention(heads, keys, values, paging, scale, window, soft_cap, sinks, scales).flatten(1)

    def _placement(self, layer: int) -> Placement:
        return self._inputs.placements[self._cache.places[layer][0]]


def immediately(backend: Backend, describe: Describe, cache: KvCache, tables: Sequence[torch.Tensor]) -> Begin:
    """A pass that is computed operation by operation; on the CPU at its end, for whoever begins it does not wait."""

    @torch.inference_mode()
    def compute(inputs: Inputs, asked: Asked | None) -> Computed:
        hidden = describe(Immediate(backend, inputs, cache, tables))
        finite = torch.isfinite(hidden.sum(dtype=torch.float32))  # a sum that is has only finite terms
        return Computed(hidden, finite, None if asked is None else backend.score(hidden, asked))

    def begin(inputs: Inputs, asked: Asked | None) -> Finish:
        if cache.device.type == "cpu":
            return partial(compute, inputs, asked)
        computed = compute(inputs, asked)  # put into the device's line
        return lambda: computed

    return begin
