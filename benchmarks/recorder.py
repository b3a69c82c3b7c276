"""A runner around a runner that notes when each step enters the model and leaves it, and one that computes nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from headrace.engine.types import Launcher, Plan, RowResult, Runner

from .workloads import END_ID, FIRST_ID


class Mark(NamedTuple):
    """One step: seconds on the wall and of the process's CPU at entering and leaving the model."""

    entered_s: float
    entered_cpu_s: float
    left_s: float
    left_cpu_s: float
    tokens: int  # computed
    sampled: int  # rows that sampled


class Recorder:
    """Implements `types.Runner`. `on_step` is called with the number of steps so far, after each."""

    def __init__(self, inner: Runner, on_step: Callable[[int], None] | None = None) -> None:
        self.vocab_size = inner.vocab_size
        self.eos_token_ids = inner.eos_token_ids
        self.max_model_len = inner.max_model_len
        self.num_blocks = inner.num_blocks
        self.block_size = inner.block_size
        self.window = inner.window
        self.num_window_blocks = inner.num_window_blocks
        self.marks: list[Mark] = []
        self._inner = inner
        self._on_step = on_step

    def run(self, plan: Plan) -> list[RowResult]:
        """Pass on, and take the times."""
        return self._landed(plan, partial(self._inner.run, plan), *_now())

    def launch(self, plan: Plan) -> Callable[[], list[RowResult]]:
        """Pass on; a step is in the model from its launch on, or, where that does nothing, while it is waited for."""
        if not isinstance(self._inner, Launcher):
            return partial(self.run, plan)
        entered = _now()
        return partial(self._landed, plan, self._inner.launch(plan), *entered)

    def _landed(
        self, plan: Plan, finish: Callable[[], list[RowResult]], entered_s: float, entered_cpu_s: float
    ) -> list[RowResult]:
        results = finish()
        left_s, left_cpu_s = _now()
        sampled = sum(row.samples for row in plan.rows)
        self.marks.append(Mark(entered_s, entered_cpu_s, left_s, left_cpu_s, plan.num_tokens, sampled))
        if self._on_step is not None:
            self._on_step(len(self.marks))
        return results


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class NullRunner:
    """Implements `types.Runner`: gives each row the next of a list of ids at once."""

    def __init__(self, vocab_size: int, num_blocks: int = 16_384, max_model_len: int = 8192) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids: frozenset[int] = frozenset()
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.block_size = 16
        self.window = 0
        self.num_window_blocks = 0
        rnd = random.Random(0)
        self._results = [RowResult(rnd.randrange(FIRST_ID, min(END_ID, vocab_size))) for _ in range(4096)]
        self._next = 0

    def run(self, plan: Plan) -> list[RowResult]:
        """One id a row that samples."""
        begin, self._next = self._next, (self._next + len(plan.rows)) % (len(self._results) - 1024)
        given = self._results[begin : begin + len(plan.rows)]
        return [result if row.samples else _NOTHING for row, result in zip(plan.rows, given, strict=True)]


_NOTHING = RowResult()
