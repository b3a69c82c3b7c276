"""The report is made of what was recorded, and says what was not met and what was not measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.machine import Machine, read_machine
from benchmarks.report import Record
from benchmarks.sections import Claim, Line, Plot, Section, Table

MACHINE = Machine("A CPU (TM) 9000", 2, 7.8, "Linux 6", "cc 14", {"python": "3.12.1", "torch": "2.9"}, "abc123+", 0.1)
SECTION = Section(
    name="one",
    title="One thing",
    how="Counted by hand.",
    claims=(
        Claim("a ratio", 0.75, 0.8, "×"),
        Claim("a rate", 90.0, 102.0, "tokens/s", at_most=False),
        Claim("a peer", None, 0.8, "×", note="the peer was not run"),
    ),
    tables=(Table("Figures", ("what", "how much"), (("a | b", 1234.5), ("c", 0.01234), ("d", None), ("e", 3))),),
    plots=(
        Plot("one_lines", "Lines", "x", "y", (Line("a", (1, 2, 4), (1, 2, 3)), Line("b", (1, 2), (2, 1))), log_x=True),
        Plot("one_bars", "Bars", "", "s", (Line("s", (0, 1), (3, 5)),), bars=True, ticks=("ours", "theirs")),
    ),
    notes=("It was a fine day",),
    raw={"pairs": [[1, 2]]},
)
RECORD = Record(SECTION, MACHINE, "2026-01-02 03:04 UTC", quick=False, missing=("the peer is not here",))


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    report.save(RECORD, tmp_path)
    assert report.load(tmp_path) == [RECORD]


def test_the_report_says_it_all(tmp_path: Path) -> None:
    report.save(RECORD, tmp_path)
    text = report.write(tmp_path).read_text()
    for piece in ("A CPU (TM) 9000, 2 cores", "7.8 GiB", "torch 2.9", "commit abc123+", "2026-01-02 03:04 UTC"):
        assert piece in text
    assert "| one | a ratio | 0.750 × | ≤ 0.800 | met |" in text
    assert "| one | a rate | 90.00 tokens/s | ≥ 102 | **not met** |" in text
    assert "| one | a peer | the peer was not run | ≤ 0.800 | – |" in text
    assert "| a \\| b | 1,234 |\n| c | 0.012 |\n| d | – |\n| e | 3 |" in text
    assert "the peer is not here." in text
    assert "quick" not in text
    for name in ("one_lines.png", "one_bars.png"):
        assert f"]({name})" in text
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_running_one_again_replaces_its_part_and_keeps_the_others(tmp_path: Path) -> None:
    report.save(RECORD, tmp_path)
    other = replace(RECORD, section=replace(SECTION, name="other", title="Another thing", plots=()))
    report.save(other, tmp_path)
    report.save(replace(RECORD, section=replace(SECTION, title="One thing, again", plots=())), tmp_path)
    text = report.write(tmp_path, ["other", "one"]).read_text()
    assert text.index("## Another thing") < text.index("## One thing, again")
    assert "## One thing\n" not in text


def test_a_quick_run_says_that_its_figures_say_nothing(tmp_path: Path) -> None:
    report.save(replace(RECORD, quick=True), tmp_path)
    assert "Its figures say nothing" in report.write(tmp_path).read_text()


def test_without_results_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results"):
        report.write(tmp_path)


def test_this_machine_can_be_described() -> None:
    machine = read_machine()
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert set(machine.slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert machine.versions["torch"] != "not installed"
