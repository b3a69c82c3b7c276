"""What the tests of the chaos suite did and saw, added up by kind of server and topology: a table at a run's end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

_PROPERTY = "chaos"
# What is told of each place, in this order; what a test counts under another name is in no table.
COLUMNS = (
    *("tests", "jobs", "ends", "attempts", "kills", "freezes", "restarts", "moves", "failovers", "lost replies"),
    *("readers", "told an error", "lost by servers"),
)


def place_of(item: pytest.Item) -> str:
    """Which servers a test runs on, such as "redis8, cluster"."""
    parameters: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    kind = getattr(parameters.get("kind"), "name", "no server")
    topologies = [name for name in ("cluster", "sentinels") if name in getattr(item, "fixturenames", ())]
    return ", ".join([kind, *topologies])


def book(item: pytest.Item, counts: Mapping[str, int]) -> None:
    """Keep what a test has counted; it travels with the report of its end, from other processes too."""
    item.user_properties.append((_PROPERTY, {"place": place_of(item), **counts}))


class Summary:
    """Adds up what all tests have booked, and prints it."""

    def __init__(self) -> None:
        self._rows: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a test that has ended has booked."""
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == _PROPERTY and isinstance(value, dict):
                    counts = {key: count for key, count in value.items() if key != "place"}
                    self._rows[str(value["place"])].update({"tests": 1, **counts})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tables."""
        if not self._rows:
            return
        terminalreporter.section("chaos")
        widths = [max(len(column), 6) for column in COLUMNS]
        total = sum(self._rows.values(), Counter[str]())
        terminalreporter.write_line(_line("", COLUMNS, widths))
        for place, row in (*sorted(self._rows.items()), ("all", total)):
            terminalreporter.write_line(_line(place, [str(row[column]) for column in COLUMNS], widths))


def _line(first: str, cells: Iterable[str], widths: Iterable[int]) -> str:
    return f"{first:18}" + "".join(f"{cell:>{width + 2}}" for cell, width in zip(cells, widths, strict=True))
