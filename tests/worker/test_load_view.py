"""What is shown while weights are loaded."""

from __future__ import annotations

import io
import sys

import pytest

from headrace.worker.load_view import LINE_EVERY_S, load_progress


class Lines:
    """A log that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **fields: object) -> None:
        self.events.append((event, fields))

    warning = error = info


class Terminal(io.StringIO):
    """Standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines_of_log_come_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    log, now_s = Lines(), 0.0
    with load_progress(log, lambda: now_s) as progress:
        for tenth in range(1, 11):
            now_s = tenth * LINE_EVERY_S / 4
            progress(tenth << 30, 10 << 30)
    assert log.events == [
        ("loading the weights, 40 %", {"gib": 4.0, "of_gib": 10.0}),
        ("loading the weights, 80 %", {"gib": 8.0, "of_gib": 10.0}),
    ]
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_a_terminal_has_a_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    log, now_s = Lines(), 0.0
    with load_progress(log, lambda: now_s) as progress:
        for tenth in range(1, 11):
            now_s = tenth * LINE_EVERY_S
            progress(tenth << 30, 10 << 30)
    assert not log.events
    assert "10.0/10.0 GiB" in terminal.getvalue()
    with load_progress(log) as progress:  # nothing to load: the bar goes all the same
        pass
