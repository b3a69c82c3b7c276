"""What a benchmark hands to the report: a section of claims, tables and plots, kept as JSON beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure with its target. `value` None: not measured, and `note` says why."""

    what: str
    value: float | None
    limit: float
    unit: str = ""
    at_most: bool = True  # else at least
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.limit if self.at_most else self.value >= self.limit


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells below their column names. Floats are shown with three figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot; `x` and `y` are of one length."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture; `name` becomes its file name."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False
    bars: bool = False  # x are positions of bars, whose labels are `ticks`
    ticks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """One question and its answer."""

    name: str
    title: str
    how: str  # what was measured and in which way, a sentence or two
    claims: tuple[Claim, ...] = ()
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    notes: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what the figures were made of


def to_json(section: Section) -> dict[str, Any]:
    """The section as plain JSON types."""
    return dataclasses.asdict(section)


def from_json(found: Mapping[str, Any]) -> Section:
    """The section that `to_json` was given. Raises KeyError or TypeError for anything else."""
    return Section(
        name=found["name"],
        title=found["title"],
        how=found["how"],
        claims=tuple(Claim(**each) for each in found["claims"]),
        tables=tuple(
            Table(each["title"], tuple(each["columns"]), tuple(tuple(row) for row in each["rows"]))
            for each in found["tables"]
        ),
        plots=tuple(_plot(each) for each in found["plots"]),
        notes=tuple(found["notes"]),
        raw=found["raw"],
    )


def _plot(found: Mapping[str, Any]) -> Plot:
    lines = tuple(Line(each["label"], tuple(each["x"]), tuple(each["y"])) for each in found["lines"])
    arguments: dict[str, Any] = {**found, "lines": lines, "ticks": tuple(found["ticks"])}
    return Plot(**arguments)
