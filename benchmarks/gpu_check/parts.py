"""The parts of a check: each a process of its own, so that one that crashes, or hangs, harms no other."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..processes import ROOT
from ..sections import Section
from .notebook import Found, read_found

MOST_S = 465.0  # of all parts together; starting up and the report come on top
TOGETHER_CORES = 8  # with fewer, parts run one after the other


@dataclass(frozen=True, slots=True)
class Part:
    """A module of this package with a function `find`."""

    name: str
    limit_s: float
    alone: bool = False  # nothing runs beside it: it measures


PARTS = (
    Part("decode", 110.0),
    Part("prefill", 110.0),
    Part("rows", 110.0),
    Part("runner", 110.0),
    Part("memcheck", 60.0),
    Part("kernels", 120.0, alone=True),
    Part("engine", 180.0, alone=True),
    Part("beside", 60.0, alone=True),
)


def groups(parts: Sequence[Part], cores: int) -> list[list[Part]]:
    """Parts that run side by side, in order."""
    together = [part for part in parts if not part.alone]
    first = [together] if cores >= TOGETHER_CORES else [[part] for part in together]
    return [each for each in (*first, *([part] for part in parts if part.alone)) if each]


def run_parts(parts: Sequence[Part], dry: bool, cores: int, most_s: float = MOST_S) -> dict[str, Found]:
    """Run parts; what each found, by name."""
    found: dict[str, Found] = {}
    ends_s = time.monotonic() + most_s
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-") as folder:
        for group in groups(parts, cores):
            left_s = ends_s - time.monotonic()
            threads = max(1, cores // len(group))
            begun = [_begin(part, min(part.limit_s, left_s), dry, Path(folder), threads) for part in group]
            for each in begun:
                found[each.part.name] = each.end()
    return found


@dataclass(frozen=True, slots=True)
class _Running:
    part: Part
    limit_s: float
    begun_s: float
    process: subprocess.Popen[bytes] | None
    path: Path

    def end(self) -> Found:
        """Wait for its end, or make it."""
        if self.process is None:
            return _nothing(self.part, "there was no time left for it")
        try:
            code = self.process.wait(max(0.1, self.begun_s + self.limit_s - time.monotonic()))
            said = f"it ended with code {code} before it was done"
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            said = f"it was ended after {self.limit_s:.0f} s"
        print(f"{self.part.name}: done after {time.monotonic() - self.begun_s:.0f} s", flush=True)
        found = read_found(self.path)
        if found is None:
            return _nothing(self.part, said)
        if not found.ended:
            found.failed.append(f"{self.part.name}: {said}")
        return found


def _begin(part: Part, limit_s: float, dry: bool, folder: Path, threads: int) -> _Running:
    path, process = folder / f"{part.name}.json", None
    print(f"{part.name}: at most {max(0.0, limit_s):.0f} s", flush=True)
    if limit_s > 5:
        command = [sys.executable, "-m", "benchmarks.gpu_check.part", part.name, str(path), str(limit_s)]
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen([*command, *(["--dry-run"] if dry else [])], cwd=ROOT, env=variables)
    return _Running(part, limit_s, time.monotonic(), process, path)


def _nothing(part: Part, said: str) -> Found:
    return Found(Section(part.name, part.name, f"Nothing is known: {said}."), [f"{part.name}: {said}"])
