"""Says in one line, at the end of a run, which tests were left out and why: what a machine lacks is easily missed."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the line, if anything was left out, behind everything else."""
    reporter: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter is not None else []
    if reporter is not None and (line := left_out([_reason(report) for report in reports])):
        reporter.write_line(line, yellow=True, bold=True)


def left_out(reasons: list[str]) -> str:
    """The line; empty where nothing was left out."""
    if not reasons:
        return ""
    counted = ", ".join(f"{count} since {reason}" for reason, count in Counter(reasons).most_common())
    return f"LEFT OUT: {len(reasons)} tests: {counted}"


def _reason(report: pytest.TestReport) -> str:
    """Of a report of a skip: its place and words are its long text."""
    words = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return words.removeprefix("Skipped: ")
