"""A forward pass recorded once and computed in one call of the compiled library.

Called one by one, the two hundred operations of a small model cost more than a decode step's arithmetic takes for one
sequence: each enters C++, and each wakes the threads anew. A recorded pass enters once, with the threads going through
the operations side by side. Its activations lie in buffers of the largest step's size that are allocated once; a buffer
is used again as soon as nothing reads it any more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..embedding import Asked, Scores
from ..forward import Begin, Computed, Describe, Inputs
from ..gated import ACTIVATIONS, Activation
from ..kv_layout import cached_head_dim
from ..matrix import PANEL, Matrix
from ..rotary import Rotation
from .pointers import Scoring, address, is_whole_norm
from .structs import Operation, ScoresCall, Step

ROWS_OF, NORM, PRODUCT, GATED_PRODUCT, GATE, ROTATE, ATTEND, ADD = range(8)  # program.cpp has the same

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
class _Recorded:
    """An operation whose buffers are not known yet."""

    fields: dict[str, int | float]
    registers: dict[str, Register]  # field name → whose buffer goes there
    kept: list[torch.Tensor] = field(default_factory=list[torch.Tensor])  # what the operation points to


class Recorder:
    """A `forward.Forward` that computes nothing."""

    def __init__(self, dtype: torch.dtype, cache: torch.Tensor, tables: Sequence[torch.Tensor] = ()) -> None:
        self.dtype = dtype
        self.cache = cache
        self.tables = tables
        self.operations: list[_Recorded] = []

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
        made = _Recorded({"kind": ADD, "inputs": x.width}, {})
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
        made = _Recorded({"kind": GATE, "outputs": width, "activation": number}, {})
        return self._add(made, x=gate_up, out=self._register(width))

    def rotate_and_store(self, qkv: Register, layer: int, how: Rotation) -> Register:
        """`rotary.rotate_and_store`."""
        kv_heads, head_dim = self.cache.shape[-2], cached_head_dim(self.cache)
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
        self, query: Register, layer: int, scale: float, window: int = 0, soft_cap: float = 0.0
    ) -> Register:
        """`attention.paged_attention`."""
        made = self._cached(ATTEND, layer, query.width // cached_head_dim(self.cache))
        made.fields |= {"eps_or_scale": scale, "window": window, "soft_cap": soft_cap}
        return self._add(made, x=query, out=self._register(query.width))

    def _register(self, width: int) -> Register:
        return Register(width, len(self.operations))

    def _add(self, made: _Recorded, **registers: Register) -> Register:
        for register in registers.values():
            register.last_use = len(self.operations)
        made.registers |= registers
        made.fields["bf16"] = self.dtype == torch.bfloat16
        self.operations.append(made)
        return registers["out"]

    def _matrix(self, kind: int, matrix: Matrix, scale: float) -> _Recorded:
        if not matrix.in_panels or matrix.dtype != self.dtype:
            raise TypeError(f"expected a {self.dtype} matrix in panels, got {matrix.dtype}")
        if matrix.compressed and kind != PRODUCT:
            raise TypeError("expected a matrix in whole panels, got a compressed one")
        fields = {"kind": kind, "weight": matrix.values.data_ptr(), "inputs": matrix.inputs, "outputs": matrix.outputs}
        return _Recorded({**fields, "compressed": matrix.compressed, "eps_or_scale": scale}, {}, [matrix.values])

    def _norm(self, x: Register, weight: torch.Tensor, eps: float) -> _Recorded:
        if weight.dtype != torch.float32 or weight.shape != (x.width,):
            raise TypeError(f"expected {x.width} float32 weights, got {weight.dtype} {tuple(weight.shape)}")
        fields = {"kind": NORM, "weight": weight.data_ptr(), "inputs": x.width}
        return _Recorded({**fields, "eps_or_scale": eps}, {}, [weight])

    def _cached(self, kind: int, layer: int, heads: int) -> _Recorded:
        keys, values = self.cache[layer]
        block_size, kv_heads = keys.shape[1:3]
        fields = {
            "kind": kind, "k_cache": keys.data_ptr(), "v_cache": values.data_ptr(), "heads": heads,
            "kv_heads": kv_heads, "head_dim": cached_head_dim(keys), "block_size": block_size,
            "cache_type": cache_type(keys),
        }  # fmt: skip
        return _Recorded({**fields}, {}, [self.cache])


@dataclass(frozen=True, slots=True)
class Calls:
    """The library's functions."""

    begin: Callable[..., int]
    finish: Callable[[int], None]


class Program:
    """A recorded pass. One step at a time: its buffers are its own, its result is one of them."""

    def __init__(self, calls: Calls, recorder: Recorder, result: Register, max_rows: int) -> None:
        self._calls = calls
        self._kept = [tensor for made in recorder.operations for tensor in made.kept]
        buffers = _place(recorder, result, max_rows)
        self._result = buffers[result]
        self._result_at, self._width = self._result.data_ptr(), result.width
        self._is_bf16 = recorder.dtype == torch.bfloat16
        self._max_rows = max_rows
        self._scoring: Scoring | None = None
        self._kept += buffers.values()
        self._operations = (Operation * len(recorder.operations))()
        for operation, made in zip(self._operations, recorder.operations, strict=True):
            places = {name: buffers[register].data_ptr() for name, register in made.registers.items()}
            for name, value in {**made.fields, **places}.items():
                setattr(operation, name, value)

    def __call__(self, inputs: Inputs, asked: Asked | None = None) -> Flight:
        """Begin a step. Raises ValueError if it has more rows than buffers have."""
        if inputs.num_rows > self._max_rows:
            raise ValueError(f"a step of {inputs.num_rows} rows, and buffers for {self._max_rows}")
        paging = inputs.paging
        finite = ctypes.c_int32(1)
        step = Step(
            inputs.token_ids.data_ptr(), inputs.positions.data_ptr(), inputs.slots.data_ptr(),
            paging.block_table.data_ptr(), paging.query_start.data_ptr(), paging.kv_len.data_ptr(),
            self._result_at, ctypes.addressof(finite),
            inputs.num_rows, len(paging.kv_len), paging.block_table.shape[1], self._width, self._is_bf16,
        )  # fmt: skip
        call, scores = (None, None) if asked is None else self._scores(asked)
        number = self._calls.begin(self._operations, len(self._operations), step, call, torch.get_num_threads())
        return Flight(
            self._calls.finish, number, self._result[: inputs.num_rows], scores, finite, (self, inputs, asked)
        )

    def _scores(self, asked: Asked) -> tuple[ScoresCall, Scores]:
        if self._scoring is None or self._scoring.output is not asked.output:
            self._scoring = Scoring(self._result, asked.output, self._max_rows)
        return self._scoring.call(asked)


class Flight:
    """A step that is being computed: call it to help with what is left, and to have its result."""

    def __init__(
        self,
        finish: Callable[[int], None],
        number: int,
        hidden: torch.Tensor,
        scores: Scores | None,
        finite: ctypes.c_int32,
        kept: object,
    ) -> None:
        self._finish = finish
        self._number = number
        self._hidden = hidden
        self._scores = scores
        self._finite = finite
        self._kept = kept  # what the threads read and write, besides

    def __call__(self) -> Computed:
        """Wait for the end; at once if it is over."""
        number, self._number = self._number, 0
        if number:
            self._finish(number)
        return Computed(self._hidden, self._finite.value == 1, self._scores)

    def __del__(self) -> None:
        self()  # whoever gives up a step must not take the memory from under the threads


def record(
    calls: Calls, describe: Describe, cache: torch.Tensor, tables: Sequence[torch.Tensor], max_rows: int,
    dtype: torch.dtype,
) -> Begin:  # fmt: skip
    """Record a pass for steps of up to `max_rows` rows."""
    recorder = Recorder(dtype, cache, tables)
    result = describe(recorder)
    return Program(calls, recorder, result, max_rows)


def _place(recorder: Recorder, result: Register, max_rows: int) -> dict[Register, torch.Tensor]:
    """Give every register a buffer [max_rows, width] that nobody else uses while it is in use."""
    result.last_use = len(recorder.operations)
    placed: dict[Register, torch.Tensor] = {}
    free: list[torch.Tensor] = []  # flat
    for number, made in enumerate(recorder.operations):
        for register in made.registers.values():
            if register not in placed:
                size = max_rows * register.width
                at = next((i for i, flat in enumerate(free) if flat.numel() == size), None)
                flat = torch.zeros(size, dtype=recorder.dtype) if at is None else free.pop(at)
                placed[register] = flat.view(max_rows, register.width)
        over = {register for register in made.registers.values() if register.last_use == number}
        free += [placed[register].view(-1) for register in over]
    return placed
