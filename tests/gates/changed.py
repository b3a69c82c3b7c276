"""Says whether everything has to be compiled: kernels, engine or gates differ from what is on the main branch.

Prints "full" or "core". What is on the main branch is the last commit in common with origin/main; without one, the
commit before this one. Where neither can be told, as in a checkout of a single commit, it is "full".
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WATCHED = ("kernels", "engine", "tests/gates", "tests/support", "constraints", "pyproject.toml")


def _git(root: Path, *args: str) -> str | None:
    done = subprocess.run(["git", *args], cwd=root, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def wanted(root: Path) -> str:
    """Give "full" or "core" for the checkout at `root`, what is not committed included."""
    base = _git(root, "merge-base", "HEAD", "origin/main")
    if base is None or base == _git(root, "rev-parse", "HEAD"):
        base = _git(root, "rev-parse", "--verify", "HEAD~1")
    if base is None:
        return "full"
    differs = _git(root, "diff", "--name-only", base, "--", *WATCHED)
    fresh = _git(root, "ls-files", "--others", "--exclude-standard", "--", *WATCHED)
    return "core" if differs == "" and fresh == "" else "full"


if __name__ == "__main__":
    sys.stdout.write(wanted(Path(__file__).resolve().parents[2]) + "\n")
