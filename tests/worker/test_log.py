"""Log lines: one line an event, whatever the values hold."""

from __future__ import annotations

import json
import re

import pytest

from headrace.worker.log import render

WORD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"]*)(?: |$)')


def read_back(line: str) -> dict[str, str]:
    words = WORD.findall(line)
    assert "".join(f"{key}={value} " for key, value in words).rstrip(" ") == line.rstrip(" ")
    return {key: json.loads(value) if value.startswith('"') else value for key, value in words}


def test_a_plain_event() -> None:
    event = {"request": "my-1", "attempt": 2, "event": "started", "level": "info", "timestamp": "now", "ok": True}
    line = render(None, "info", event)
    assert line == "timestamp=now level=info event=started request=my-1 attempt=2 ok=true"


@pytest.mark.parametrize(
    "value",
    [
        "two words",
        "a\nforged=line",
        'says "hi"',
        "a=b",
        "back\\slash",
        "tab\there",
        "\x1b[31mred",
        "\x00",
        "\r",
        "ü",
        "",
    ],
)
def test_a_value_comes_back_and_forges_nothing(value: str) -> None:
    line = render(None, "info", {"event": "an event", "error": value})
    assert "\n" not in line
    assert not re.search(r"[\x00-\x1f]", line)
    assert read_back(line) == {"timestamp": "", "level": "", "event": "an event", "error": value}


def test_none_is_empty() -> None:
    assert render(None, "info", {"event": "e", "reason": None}).endswith("reason=")
