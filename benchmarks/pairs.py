"""Comparing two programs on a machine whose speed drifts: pairs that alternate, the median of their ratios, its spread.

    A B   B A   A B   B A   …      each pair is one after the other, so that both see the same machine

A difference below 10 % is shown in CPU seconds of the processes concerned: those drift less than seconds on the wall.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

A = TypeVar("A")
B = TypeVar("B")
NEAR = 0.10  # ratios this near to 1 are quoted in CPU seconds
LEAST_PAIRS = 5


class Cost(NamedTuple):
    """What one run took."""

    wall_s: float
    cpu_s: float  # user and system, of all processes that belong to it


@dataclass(frozen=True, slots=True)
class Spread:
    """A list of numbers in short."""

    median: float
    low: float
    high: float
    count: int

    def text(self, digits: int = 3) -> str:
        """Such as `0.83 (0.81 … 0.86)`."""
        if self.count == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} … {self.high:.{digits}f})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A over B, in both units; `quoted` is the one to show."""

    wall: Spread
    cpu: Spread
    unit: Literal["seconds", "CPU seconds"]

    @property
    def quoted(self) -> Spread:
        """The ratio that counts."""
        return self.wall if self.unit == "seconds" else self.cpu


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest. Raises ValueError for none."""
    if not values:
        raise ValueError("no values")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of all (0 to 1) do not exceed, interpolated between neighbours. Raises ValueError."""
    if not values or not 0 <= share <= 1:
        raise ValueError("a share from 0 to 1 of at least one value")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def alternate(a: Callable[[], A], b: Callable[[], B], pairs: int) -> list[tuple[A, B]]:
    """Run both `pairs` times, in the order A B B A A B …; give the pairs as (A, B). Raises ValueError for no pairs."""
    if pairs < 1:
        raise ValueError("at least one pair")
    done: list[tuple[A, B]] = []
    for number in range(pairs):
        if number % 2 == 0:
            first = a()
            done.append((first, b()))
        else:
            second = b()
            done.append((a(), second))
    return done


def ratios(pairs: Sequence[tuple[float, float]]) -> Spread:
    """A over B of each pair. Raises ValueError if there is none, ZeroDivisionError if a B is 0."""
    return spread([first / second for first, second in pairs])


def compare(pairs: Sequence[tuple[Cost, Cost]]) -> Comparison:
    """A over B, quoted in CPU seconds where the seconds on the wall differ by less than 10 %. Raises as `ratios`."""
    wall = ratios([(a.wall_s, b.wall_s) for a, b in pairs])
    cpu = ratios([(a.cpu_s, b.cpu_s) for a, b in pairs])
    return Comparison(wall, cpu, "CPU seconds" if abs(wall.median - 1) < NEAR else "seconds")
