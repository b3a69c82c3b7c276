"""The steps that a runner computes: one, or two where it can begin a step before the one before has given its tokens.

    one step in flight       launch 1 ─ land 1 ─ launch 2 ─ land 2
    two                      launch 1, 2 ─ land 1 ─ draw 2, launch 3 ─ land 2 ─ draw 3, launch 4 ─ …

A step begins with what is known before its own tokens and those of the step before; it samples (`draw`) when all
tokens before its own are known, so that sampling sees what it would see if steps never overlapped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

from .scheduler import Scheduler
from .sequence import State
from .types import Flight, Launcher, Overlapper, Plan, RowResult, Runner


class Landed(NamedTuple):
    """What a step gave."""

    plan: Plan
    results: list[RowResult]
    started_s: float


@dataclass(frozen=True, slots=True)
class _Whole:
    """A step of a runner that samples when it is done."""

    finish: Callable[[], list[RowResult]]

    def draw(self) -> None:
        """Nothing: `finish` does."""


@dataclass(slots=True)
class _InFlight:
    """A step; `begun` is None while it is being launched."""

    plan: Plan
    started_s: float
    begun: Flight | None = None
    drawn: bool = False

    def draw(self) -> None:
        """Begin to sample, unless that has been done."""
        if self.begun is not None and not self.drawn:
            self.drawn = True
            self.begun.draw()

    def finish(self) -> list[RowResult]:
        """Wait for the results."""
        self.draw()
        return [] if self.begun is None else self.begun.finish()


class Flights:
    """Steps in flight, planned by a scheduler, the oldest first."""

    def __init__(self, runner: Runner, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._launches, self._overlaps = isinstance(runner, Launcher), isinstance(runner, Overlapper)
        self._depth = runner.depth if isinstance(runner, Overlapper) else 1
        self._flights: deque[_InFlight] = deque()

    def launch(self) -> bool:
        """Begin as many steps as may be in flight; False if none is then. Raises RuntimeError if none can be begun.

        What the runner raises comes through, and nothing is in flight any more.
        """
        if len(self._flights) >= self._depth:
            raise RuntimeError("a step is in flight already")
        with self._cancelling():
            while len(self._flights) < self._depth:
                if self._flights:
                    self._flights[0].draw()
                plan = self._scheduler.plan()
                if not plan.rows:
                    break
                self._flights.append(_InFlight(plan, self._clock()))
                self._flights[-1].begun = self._begin(plan)
        return bool(self._flights)

    def land(self) -> Landed | None:
        """Wait for the oldest; None if there is none. The caller commits and retires it. Raises as `launch` does."""
        if not self._flights:
            return None
        flight = self._flights[0]
        with self._cancelling():
            results = flight.finish()
            if len(results) != len(flight.plan.rows):
                raise RuntimeError(f"the runner gave {len(results)} results for {len(flight.plan.rows)} rows")
        self._flights.popleft()
        return Landed(flight.plan, results, flight.started_s)

    def cancel(self) -> None:
        """Let go of all, the newest first: it begins where the one before ends."""
        while self._flights:
            self._scheduler.cancel(self._flights.pop().plan.step)

    def _begin(self, plan: Plan) -> Flight:
        if self._overlaps:
            return cast("Overlapper", self._runner).begin(plan)
        return _Whole(cast("Launcher", self._runner).launch(plan) if self._launches else partial(self._run, plan))

    def _run(self, plan: Plan) -> list[RowResult]:
        """All of a step at its end, without what has ended since it was launched."""
        rows = tuple(row for row in plan.rows if row.sequence.state is State.RUNNING)
        if len(rows) == len(plan.rows):
            return self._runner.run(plan)
        results = iter(self._runner.run(replace(plan, rows=rows)) if rows else ())
        return [next(results) if row.sequence.state is State.RUNNING else RowResult() for row in plan.rows]

    @contextmanager
    def _cancelling(self) -> Generator[None]:
        try:
            yield
        except BaseException:  # an interrupt too: what was planned must be free to be planned again
            self.cancel()
            raise
