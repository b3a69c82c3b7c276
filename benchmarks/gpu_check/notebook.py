"""What a part finds, written down after each step, so that what is there stays when the part is ended."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..sections import Cell, Claim, Plot, Section, Table, from_json, to_json
from .ground import Ground

RIGHT, WRONG = "right", "**wrong**"


@dataclass(slots=True)
class Found:
    """A part's section, what of it went wrong, and whether the part came to its end."""

    section: Section
    failed: list[str] = field(default_factory=list[str])
    ended: bool = False


def read_found(path: Path) -> Found | None:
    """What a part has written so far; None if that is nothing."""
    if not path.is_file():
        return None
    kept: dict[str, Any] = json.loads(path.read_text())
    return Found(from_json(kept["section"]), kept["failed"], kept["ended"])


class Notebook:
    """Collects a part's checks, tables, plots and notes."""

    def __init__(self, name: str, title: str, how: str, ground: Ground, path: Path, limit_s: float) -> None:
        self.ground = ground
        self._name, self._title, self._how, self._path = name, title, how, path
        self._ends_s = time.monotonic() + limit_s
        self._checks: list[tuple[Cell, ...]] = []
        self._tables: dict[str, tuple[tuple[str, ...], list[tuple[Cell, ...]]]] = {}
        self._claims: list[Claim] = []
        self._plots: list[Plot] = []
        self._notes: list[str] = []
        self._failed: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds until the part is ended."""
        return self._ends_s - time.monotonic()

    def check(self, what: str, work: Callable[[], str | None]) -> None:
        """Do a check and write down what became of it: whatever it raises is its failure, what it gives a remark."""
        remark = self._done(what, work)
        if remark is not None:
            self._checks.append((what, RIGHT, remark))
        self.save()

    def measure(self, what: str, work: Callable[[], None]) -> None:
        """Do a measurement, which writes down its figures itself; only what it raises is written down here."""
        self._done(what, work)
        self.save()

    def _done(self, what: str, work: Callable[[], str | None]) -> str | None:
        """What the work gives, at least an empty string; None if it went wrong."""
        begun_s = time.monotonic()
        try:
            remark = work() or ""
            self.ground.wait()
        except Exception as error:  # noqa: BLE001  the next one goes on
            traceback.print_exc()
            self.fail(what, " ".join(f"{type(error).__name__}: {error}".split())[:300])
            return None
        self._say(f"{what}: done ({time.monotonic() - begun_s:.1f} s) {remark}")
        return remark

    def fail(self, what: str, said: str) -> None:
        """Write down something that went wrong."""
        self._checks.append((what, WRONG, said))
        self._failed.append(f"{self._name}: {what}: {said}")
        self._say(f"{what}: WRONG {said}")

    def row(self, title: str, columns: tuple[str, ...], *cells: Cell) -> None:
        """Add a row to the table of that title."""
        self._tables.setdefault(title, (columns, []))[1].append(cells)

    def figure(self, value: float) -> Cell:
        """See `Ground`."""
        return self.ground.figure(value)

    def claim(self, what: str, value: float, limit: float, unit: str, *, at_most: bool) -> None:
        """Hold a figure against its target; in a dry run there is none."""
        dry = self.ground.dry
        self._claims.append(Claim(what, None if dry else value, limit, unit, at_most, "dry run" if dry else ""))

    def plot(self, plot: Plot) -> None:
        """Add a picture."""
        self._plots.append(plot)

    def note(self, sentence: str) -> None:
        """Add a remark."""
        self._notes.append(sentence)

    def save(self, *, ended: bool = False) -> None:
        """Write everything down."""
        checks = Table("Checks", ("check", "", "remark"), tuple(self._checks))
        tables = tuple(Table(title, columns, tuple(rows)) for title, (columns, rows) in self._tables.items())
        section = Section(
            self._name, self._title, self._how, tuple(self._claims),
            ((checks,) if self._checks else ()) + tables, tuple(self._plots), tuple(self._notes),
        )  # fmt: skip
        kept = {**asdict(Found(section, self._failed, ended)), "section": to_json(section)}
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(kept))
        new.replace(self._path)

    def _say(self, what: str) -> None:
        print(f"  {self._name}: {what}", flush=True)
