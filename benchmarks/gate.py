"""A benchmark is reported only where the tests of what it measures are green."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.engine.threads import available_cores

from .processes import ROOT, environment

_FEW = 3  # paths


class RedTestsError(RuntimeError):
    """Tests of what is to be measured fail; the message names them. No figure is to be shown."""


class Gate:
    """Runs each test path once in its life."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._green: set[str] = set()

    def require(self, paths: Sequence[str]) -> None:
        """Run those paths that have not been. Raises RedTestsError if a test fails, or there is none."""
        new = [path for path in dict.fromkeys(paths) if path not in self._green]
        if not new:
            return
        missing = [path for path in new if not (self._root / path).exists()]
        if missing:
            raise RedTestsError(f"there are no tests {', '.join(missing)}, so nothing is measured")
        # Worth starting further processes for only where there is much to run.
        side_by_side = ("-n", str(available_cores()), "--dist", "worksteal") if len(new) > _FEW else ()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *side_by_side, *new]
        done = subprocess.run(command, cwd=self._root, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            said = "\n".join(done.stdout.splitlines()[-15:])
            raise RedTestsError(f"tests of what is to be measured are red, so nothing is reported:\n{said}")
        self._green.update(new)
