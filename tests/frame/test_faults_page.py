"""`docs/faults.md` is true: every line of its list is there once, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
LISTED = re.findall(r"[A-Z]+\d+", PAGE.partition("<!-- lines")[2].partition("-->")[0])
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| [A-Z]+\d", line)
]
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)


@cache
def functions_of(file: str) -> set[str]:
    """Names of all functions of a file; nothing is run."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_line_of_the_list_is_there_once_and_no_other() -> None:
    assert len(LISTED) == len(set(LISTED)) > 90
    assert [row[0] for row in ROWS] == LISTED


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_line_says_what_where_and_what_keeps_it_away(row: list[str]) -> None:
    line, fault, reported, kept_away = row
    assert len(fault.split()) > 3, line
    assert re.search(r"https://|`[\w/.]+`|protocol", reported), f"{line} has no source"
    assert "::test_" in kept_away or kept_away.startswith("Cannot occur"), f"{line} names neither a test nor a reason"


def test_every_test_that_the_page_names_exists() -> None:
    assert len(NAMED) == PAGE.count("::"), "a test is named in another form"
    missing = [
        f"{file}::{name}"
        for file, name in NAMED
        if not (ROOT / "tests" / file).is_file() or name not in functions_of(file)
    ]
    assert missing == []


def test_no_test_stands_on_a_fake_server() -> None:
    """Nor on any other mock: what a real server does is what the rules are about."""
    fakes = {"fakeredis", "mock", "pytest_mock", "mockredis", "birdisle"}
    found: list[str] = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = getattr(node, "module", "") or "" if isinstance(node, ast.ImportFrom) else ""
            if fakes & {part for name in (*names, module) for part in name.split(".")}:
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    assert found == []
