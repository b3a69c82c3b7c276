"""Prints how long each test folder took, and fails the run when the whole passes its budget.

The budget keeps the suite one that people run: `--budget-s` is set by `make test`, no limit applies without it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import pytest


class Budget:
    """Adds up set-up, call and tear-down seconds per folder under `tests/`."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.started_s = time.monotonic()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tests: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Book one phase of one test."""
        parts = Path(report.nodeid.split("::")[0]).parts
        folder = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        self.seconds[folder] += report.duration
        self.tests[folder].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        total_s = time.monotonic() - self.started_s
        terminalreporter.section("seconds per folder")
        for folder in sorted(self.seconds):
            terminalreporter.write_line(f"{folder:24} {len(self.tests[folder]):5} tests {self.seconds[folder]:8.1f} s")
        limit = f" of {self.limit_s:.0f} s" if self.limit_s else ""
        terminalreporter.write_line(f"{'all':24} {sum(map(len, self.tests.values())):5} tests {total_s:8.1f} s{limit}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that took longer than its budget."""
        if self.limit_s and time.monotonic() - self.started_s > self.limit_s and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--budget-s`."""
    parser.addoption("--budget-s", type=float, default=None, help="fail when the whole run takes longer (seconds)")


def pytest_configure(config: pytest.Config) -> None:
    """Install the bookkeeper."""
    config.pluginmanager.register(Budget(config.getoption("--budget-s")), "headrace-budget")
