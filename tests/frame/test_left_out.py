"""What a run leaves out is said at its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_last_line_names_what_was_left_out_and_why(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.skipif(True, reason='there is no such server')\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_a(n): pass\n"
        "def test_b(): pytest.skip('of the moon')\n"
        "def test_c(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.left_out", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1]
    assert last == "LEFT OUT: 3 tests: 2 since there is no such server, 1 since of the moon", done.stdout
