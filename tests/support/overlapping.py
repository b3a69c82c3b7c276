"""Scripted runners that begin a step before the one before has given its tokens, as a GPU's does.

What a step writes and reads is what its plan held when it was begun. The early runner computes at once, the late one
not before it must: between them lies whatever a device may do.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from typing import ClassVar

from headrace.engine.sequence import Sequence, State
from headrace.engine.types import Plan, RowResult, ScheduledRow

from .scripted import PagingError, ScriptedRunner


@dataclass(eq=False)
class _Flight:
    runner: OverlappingRunner
    plan: Plan
    held: list[ScheduledRow]  # of the plan, with the sequences as they were
    drawn: bool = False
    over: bool = False  # computed, or given up
    results: list[RowResult] | RuntimeError | None = None

    def draw(self) -> None:
        """Every token before is known now."""
        if self.drawn:
            raise PagingError(f"step {self.plan.step} samples twice")
        self.drawn = True
        for row in self.plan.rows:
            known = len(row.sequence.token_ids)
            if row.samples and row.sequence.state is not State.ENDED and known != row.start + row.num_tokens:
                raise PagingError(f"step {self.plan.step} samples behind {known} tokens of {row.sequence.request_id}")
        if not self.runner.late:
            self.runner.compute_in_turn(self)

    def finish(self) -> list[RowResult]:
        """Wait."""
        if not self.drawn:
            raise PagingError(f"step {self.plan.step} has not begun to sample")
        self.runner.land(self)
        if isinstance(self.results, RuntimeError):
            raise self.results
        if self.results is None:
            raise PagingError(f"step {self.plan.step} is finished twice")
        results, self.results = self.results, None
        return results

    def compute(self) -> None:
        """Read and write what the blocks were when the step was begun."""
        self.over = True
        rows = tuple(self.runner.with_tokens(row, held) for row, held in zip(self.plan.rows, self.held, strict=True))
        try:
            self.results = self.runner.compute(replace(self.plan, rows=rows))
        except RuntimeError as error:
            self.results = error
            return
        for row, result in zip(self.plan.rows, self.results, strict=True):
            if result.token_id is not None:
                self.runner.sampled[row.sequence] = (row.start + row.num_tokens, result.token_id)

    def write(self) -> None:
        """What is left of a step that was given up: it may write, and nobody reads what."""
        self.over = True
        for row, held in zip(self.plan.rows, self.held, strict=True):
            self.runner.scribble(row, held)


@dataclass
class OverlappingRunner(ScriptedRunner):
    """Implements `types.Overlapper`."""

    late: ClassVar[bool] = False
    depth: int = 2
    sampled: dict[Sequence, tuple[int, int]] = field(default_factory=dict[Sequence, tuple[int, int]])
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._air: list[_Flight] = []

    def begin(self, plan: Plan) -> _Flight:
        """Take down what the plan's sequences hold."""
        self._check_tables(plan)
        waits = any(row.start + row.num_tokens > len(row.sequence.token_ids) for row in plan.rows)
        if waits and not (self._air and self._air[-1].drawn):
            raise PagingError(f"step {plan.step} begins before the one before has begun to sample")
        flight = _Flight(self, plan, [row._replace(sequence=_as_held(row)) for row in plan.rows])
        self._air.append(flight)
        self.most_in_flight = max(self.most_in_flight, len(self._air))
        return flight

    def compute_in_turn(self, flight: _Flight) -> None:
        """Compute a step; what was begun before it and is not computed has been given up."""
        for earlier in self._air[: self._air.index(flight)]:
            if not earlier.over:
                earlier.write()
        flight.compute()

    def land(self, flight: _Flight) -> None:
        """Have a step computed, and forget all before it."""
        if not flight.over:
            self.compute_in_turn(flight)
        del self._air[: self._air.index(flight) + 1]

    def with_tokens(self, row: ScheduledRow, held: ScheduledRow) -> ScheduledRow:
        """The row with its tokens, of which the last may have been sampled by the step before."""
        token_ids, end = list(row.sequence.token_ids), row.start + row.num_tokens
        if len(token_ids) < end:
            position, token_id = self.sampled.get(row.sequence, (-1, 0))
            if position != len(token_ids) and row.sequence.state is not State.ENDED:  # it ended without that token
                raise PagingError(f"{row.sequence.request_id} lacks more than the token before")
            token_ids.append(token_id)
        held.sequence.token_ids = token_ids[:end] if row.samples else token_ids
        return held

    def scribble(self, row: ScheduledRow, held: ScheduledRow) -> None:
        """Overwrite where a row writes."""
        for blocks, ids in ((self.blocks, held.sequence.block_ids), (self.window_blocks, held.sequence.window_ids)):
            for position in range(row.start, row.start + row.num_tokens) if blocks else ():
                index, slot = divmod(position, self.block_size)
                blocks[ids[index]].tokens[slot] = -2


class LateRunner(OverlappingRunner):
    """Computes when it must."""

    late: ClassVar[bool] = True


def _as_held(row: ScheduledRow) -> Sequence:
    held = copy(row.sequence)
    held.block_ids, held.window_ids = list(held.block_ids), list(held.window_ids)
    held.num_computed_tokens = row.start
    return held
