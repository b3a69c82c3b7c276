"""No figure where the tests of what is measured are red."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks.__main__ as program
from benchmarks import questions
from benchmarks.gate import Gate, RedTestsError
from benchmarks.processes import ROOT
from benchmarks.questions import QUESTIONS, Question
from benchmarks.sections import Section

GREEN = "def test_right():\n    assert 1 + 1 == 2\n"
RED = "def test_wrong():\n    assert 1 + 1 == 3\n"


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return name


def test_green_tests_open_the_gate_and_run_once(tmp_path: Path) -> None:
    counted = (
        "from pathlib import Path\n\ndef test_it():\n    with Path('runs').open('a') as out:\n        out.write('x')\n"
    )
    paths = [write(tmp_path, "test_green.py", GREEN), write(tmp_path, "test_counted.py", counted)]
    gate = Gate(tmp_path)
    gate.require(paths)
    gate.require(paths[1:])
    assert (tmp_path / "runs").read_text() == "x"


def test_a_red_test_keeps_it_shut_and_is_named(tmp_path: Path) -> None:
    paths = [write(tmp_path, "test_green.py", GREEN), write(tmp_path, "test_red.py", RED)]
    gate = Gate(tmp_path)
    for _ in range(2):
        with pytest.raises(RedTestsError, match=r"test_red\.py::test_wrong"):
            gate.require(paths)


@pytest.mark.parametrize(("text", "said"), [(None, r"there are no tests test_empty\.py"), ("x = 1\n", "no tests ran")])
def test_tests_that_are_not_there_are_not_green(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        write(tmp_path, "test_empty.py", text)
    with pytest.raises(RedTestsError, match=said):
        Gate(tmp_path).require(["test_empty.py"])


def test_every_benchmark_names_tests_that_exist() -> None:
    for name, question in QUESTIONS.items():
        assert question.tests, name
        assert [path for path in question.tests if not (ROOT / path).exists()] == [], name


def test_the_program_measures_nothing_behind_a_red_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(*_: object) -> Section:
        measured.append("it")
        return Section("one", "One", "how")

    monkeypatch.setattr(program, "Gate", lambda: Gate(tmp_path))
    tests = (write(tmp_path, "test_it.py", RED),)
    monkeypatch.setitem(questions.QUESTIONS, "one", Question(measure, tests))
    out = tmp_path / "out"
    assert program.main(["--only", "one", "--quick", "--out", str(out)]) == program.EXIT_RED
    assert (measured, out.exists()) == ([], False)
    assert "test_wrong" in capsys.readouterr().err
    write(tmp_path, "test_it.py", GREEN)
    assert program.main(["--only", "one", "--quick", "--out", str(out)]) == program.EXIT_OK
    assert measured == ["it"]
    assert (out / "report.md").is_file()
