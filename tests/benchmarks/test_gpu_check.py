"""The check for GPUs: all of it runs where there is none, what is wrong is said, and no GPU is an exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import engine, memcheck, parts
from benchmarks.gpu_check.notebook import Found
from benchmarks.gpu_check.parts import PARTS, Part, groups, run_parts
from benchmarks.processes import ROOT
from benchmarks.sections import Section

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: make gpu-check is the test")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    variables.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.gpu_check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=400, check=False)


def test_without_a_gpu_it_says_so_in_a_sentence() -> None:
    done = run()
    assert done.returncode == command.EXIT_NO_GPU
    assert done.stdout == ""
    assert re.fullmatch(r"There is no NVIDIA GPU [^\n]*\.\n", done.stderr)


@pytest.mark.slow
def test_the_dry_run_runs_everything_and_shows_no_figure(tmp_path: Path) -> None:
    done = run("--dry-run", "--out", tmp_path)
    assert done.returncode == command.EXIT_OK, done.stdout[-3000:]
    text = (tmp_path / "gpu_check.md").read_text()
    assert "Nothing went wrong." in text and "wrong**" not in text
    assert text.count("| right |") > 60
    for title in ("Decode attention", "Prefill attention", "The runner", "Speed of kernels", "A whole engine"):
        assert f"## {title}\n" in text
    assert text.count("dry run") > 150
    for unit in ("µs", "TB/s", "TFLOP/s", "GB/s", "tokens/s"):
        for table in re.findall(rf"\|[^\n]*{unit}[^\n]*\|\n\|[ -|]*\n((?:\|[^\n]*\n)+)", text):
            assert all("dry run" in row for row in table.splitlines())
    assert (tmp_path / "decode_bf16.png").read_bytes().startswith(b"\x89PNG")


def test_a_part_that_goes_wrong_or_hangs_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Parts in place of ours: one that ends in the middle, one that does not end, one that is not there."""
    (tmp_path / "stuck.py").write_text("import time\nTITLE = HOW = 'x'\ndef find(notes): time.sleep(60)\n")
    (tmp_path / "gone.py").write_text(
        "import os\nTITLE = HOW = 'x'\n"
        "def find(notes):\n"
        "    notes.check('good', lambda: 'fine')\n"
        "    notes.check('bad', lambda: 1 / 0)\n"
        "    os._exit(3)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(
        f"import benchmarks.gpu_check\nbenchmarks.gpu_check.__path__.append({str(tmp_path)!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    found = run_parts([Part("gone", 60), Part("stuck", 12), Part("memcheck", 60)], dry=True, cores=8)
    assert found["gone"].failed == [
        "gone: bad: ZeroDivisionError: division by zero", "gone: it ended with code 3 before it was done",
    ]  # fmt: skip
    assert [row[:2] for row in found["gone"].section.tables[0].rows] == [("good", "right"), ("bad", "**wrong**")]
    assert found["stuck"].failed == ["stuck: it was ended after 12 s"]
    assert found["memcheck"].failed == [] and found["memcheck"].ended
    late = run_parts([Part("memcheck", 60)], dry=True, cores=1, most_s=1.0)
    assert late["memcheck"].failed == ["memcheck: there was no time left for it"]


def test_what_went_wrong_is_in_the_report_and_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = {"rows": Found(Section("rows", "Rows", "How."), ["rows: one thing: off by 3"])}
    monkeypatch.setattr(command, "run_parts", lambda *_: bad)
    monkeypatch.setattr(command, "describe_gpu", lambda _: {"GPU": "NVIDIA X100 (80 GB)", "torch": "2.11"})
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    assert command.main(["--out", str(tmp_path)]) == command.EXIT_WRONG
    text = (tmp_path / "gpu_check.md").read_text()
    assert "**1 went wrong:** rows: one thing: off by 3." in text
    assert "GPU: NVIDIA X100 (80 GB); torch: 2.11." in text and "matplotlib is not installed" in text
    assert "dry run" not in text and "quick" not in text
    with pytest.raises(SystemExit):
        command.main(["--only", "nothing"])
    assert command._folder("NVIDIA X100 (80 GB)", dry=False).endswith("-nvidia-x100-80-gb")


def test_what_measures_runs_alone_and_all_fits_into_the_time() -> None:
    names = [[part.name for part in group] for group in groups(PARTS, 16)]
    assert names == [["decode", "prefill", "rows", "runner", "memcheck"], ["kernels"], ["engine"], ["beside"]]
    assert all(len(group) == 1 for group in groups(PARTS, 2))
    assert sum(max(part.limit_s for part in group) for group in groups(PARTS, 16)) <= 480
    assert parts.MOST_S < 480


def test_a_tool_that_finds_something_is_told_from_one_that_cannot_work(tmp_path: Path) -> None:
    def tool(said: str, code: int = 0) -> list[str]:
        script = tmp_path / "tool"
        script.write_text(f"#!/bin/sh\n{said}\nexit {code}\n")
        script.chmod(0o755)
        return [str(script)]

    clean = memcheck.CLEAN
    assert memcheck.watched(tool(f"echo '{clean}'"), 20, clean) == clean
    assert "does not work" in memcheck.watched(tool("echo 'Device not supported'", 1), 20, clean)
    assert "nothing is known" in memcheck.watched(tool("exec sleep 30"), 0.5, clean)
    with pytest.raises(RuntimeError, match="3 errors"):
        memcheck.watched(tool("echo 'ERROR SUMMARY: 3 errors'"), 20, clean)


def test_the_load_is_the_same_again_and_as_long_as_it_says() -> None:
    work = engine.work_of(engine.REAL, 1000)
    assert work == engine.work_of(engine.REAL, 1000) and len(work) == 256
    lengths = [len(each.prompt) for each in work] + [each.num_out for each in work]
    assert 100 <= min(lengths) <= 110 and 1010 <= max(lengths) <= 1024
    alike = engine.work_of(engine.REAL, 1000, 4, 64)
    assert len({tuple(each.prompt[:64]) for each in alike}) == 1
    assert [engine.quantile([3, 1, 2, 4], part) for part in (0.0, 0.5, 0.99)] == [1, 3, 4]
