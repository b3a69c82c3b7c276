"""A forward pass recorded once and computed in one call of the compiled library.

Called one by one, the two hundred operations of a small model cost more than a decode step's arithmetic takes for one
sequence: each enters C++, and each wakes the threads anew. A recorded pass enters once, with the threads going through
the operations side by side. Its activations lie in buffers of the largest step's size that are allocated once; a buffer
is used again as soon as nothing reads it any more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..embedding import Asked, Scores
from ..forward import Begin, Computed, Describe, Inputs
from ..kv_cache import KvCache
from .pointers import Scoring
from .recorder import Recorder, Register
from .structs import Operation, ScoresCall, Step


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
        paging = inputs.placements[0].paging  # lengths are the same in all
        places = (at.data_ptr() for slots, where in inputs.placements for at in (slots, where.block_table))
        finite = ctypes.c_int32(1)
        step = Step(
            inputs.token_ids.data_ptr(), inputs.positions.data_ptr(), paging.query_start.data_ptr(),
            paging.kv_len.data_ptr(), self._result_at, ctypes.addressof(finite),
            inputs.num_rows, len(paging.kv_len), paging.block_table.shape[1], self._width, self._is_bf16, *places,
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
    calls: Calls, describe: Describe, cache: KvCache, tables: Sequence[torch.Tensor], max_rows: int,
    dtype: torch.dtype,
) -> Begin:  # fmt: skip
    """Record a pass for steps of up to `max_rows` rows."""
    recorder = Recorder(dtype, cache, tables, max_rows)
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
