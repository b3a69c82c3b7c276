"""Create `.venv` and install the project for development. Called by `make setup`; needs only Python 3.11 with pip.

The one thing to get right is torch: on a machine without an NVIDIA GPU the build for CPUs is taken, and set-up stops
with a clear word before it would download several gigabytes of CUDA libraries. TORCH_INDEX names an index to take it
from; without it the PyTorch CPU index is tried first, then whatever pip is configured with.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MINIMUM = (3, 11)
STAMP = VENV / "headrace-setup.stamp"


def fail(message: str) -> None:
    """Stop with one clear line."""
    sys.exit(f"setup: {message}")


def pip(*args: str, python: Path = VENV / "bin" / "python", quiet: bool = True) -> None:
    """Run pip in the environment; stop the set-up when it fails."""
    done = subprocess.run([python, "-m", "pip", "install", *(["-q"] if quiet else []), *args], check=False)
    if done.returncode:
        fail("pip could not install what the project needs; its message is above")


def answers(index: str) -> bool:
    """Whether a package index can be reached."""
    try:
        with urllib.request.urlopen(index.rstrip("/") + "/torch/", timeout=5):
            return True
    except (urllib.error.URLError, OSError, ValueError):
        return False


def constraint(name: str, file: Path) -> str:
    """The pinned requirement of a package, such as `torch==2.13.0`."""
    for line in file.read_text().splitlines():
        if line.partition("==")[0].strip() == name:
            return line.strip()
    fail(f"{file.name} does not pin {name}")
    return ""


def index_args() -> list[list[str]]:
    """Where to look for torch, in order."""
    if named := os.environ.get("TORCH_INDEX"):
        return [["--index-url", named]]
    return [*([["--index-url", CPU_INDEX]] if answers(CPU_INDEX) else []), []]


def brings_cuda(requirement: str, index: list[str], python: Path) -> bool | None:
    """Whether pip would install CUDA libraries for this requirement; None if it cannot be found there."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [python, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--ignore-installed"]
        done = subprocess.run(
            [*command, "--report", report.name, *index, requirement], check=False, capture_output=True
        )
        if done.returncode:
            return None
        metadata = json.loads(Path(report.name).read_text())["install"][0]["metadata"]
    needs = " ".join(metadata.get("requires_dist", []))
    return "nvidia-" in needs or "cuda-" in needs


def install_torch(constraints: Path, python: Path) -> None:
    """Install the pinned torch: for CUDA where there is a GPU, otherwise the build for CPUs or nothing."""
    requirement = constraint("torch", constraints)
    if shutil.which("nvidia-smi"):
        pip(requirement, python=python)
        return
    for index in index_args():
        if brings_cuda(requirement, index, python) is False:
            pip(*index, "--no-deps", requirement, python=python)
            return
    fail(
        f"this machine has no NVIDIA GPU, and no CPU build of {requirement} was found (the default one would download "
        "several GB of CUDA libraries). Set TORCH_INDEX to an index that has one."
    )


def constraints_file() -> Path:
    """The pinned versions for this kind of machine."""
    return ROOT / "constraints" / ("cuda.txt" if shutil.which("nvidia-smi") else "cpu.txt")


def fingerprint(constraints: Path) -> str:
    """Changes when anything that set-up depends on does."""
    parts = [(ROOT / "pyproject.toml").read_bytes(), constraints.read_bytes(), sys.version.encode(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def link_import_root() -> None:
    """Lay a folder in which `headrace.engine` is a path, for tools that resolve imports by path (pyright)."""
    root = ROOT / "build" / "import-root" / "headrace"
    root.mkdir(parents=True, exist_ok=True)
    for folder in ("clients", "worker", "engine", "kernels"):
        link = root / folder
        if not link.is_symlink():
            link.symlink_to(ROOT / folder)


def main() -> None:
    """Make the environment, or do nothing if it is up to date."""
    if sys.version_info < MINIMUM:
        fail(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; call make with PYTHON=/path/to/it")
    link_import_root()
    constraints = constraints_file()
    wanted = fingerprint(constraints)
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    print("setup: making .venv (the first time takes a minute or two)", flush=True)
    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, with_pip=True)
    python = VENV / "bin" / "python"
    print("setup: installing torch", flush=True)
    install_torch(constraints, python)
    print("setup: installing headrace and its other dependencies", flush=True)
    pip("-c", str(constraints), "-e", f"{ROOT}[worker,dev]", python=python)
    STAMP.write_text(wanted)
    print("setup: done", flush=True)


if __name__ == "__main__":
    main()
