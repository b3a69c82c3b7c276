"""The versions of Triton besides the installed one that kernels are compiled with, installed beside it once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
CACHE = BUILD / "triton-cache"
OLDEST = "3.6.0"  # what torch 2.11 pins


def pinned_versions() -> list[str]:
    """That of the current torch for CUDA, and the oldest."""
    lines = (ROOT / "constraints" / "cuda.txt").read_text().splitlines()
    return [next(line.removeprefix("triton==") for line in lines if line.startswith("triton==")), OLDEST]


def import_path(version: str) -> list[str]:
    """What has to be in front of the import path for a version; nothing for the installed one."""
    from importlib.metadata import version as installed

    return [] if version == installed("triton") else [str(_installed(version))]


def _installed(version: str) -> Path:
    folder = BUILD / f"triton-{version}"
    if not folder.exists():
        print(f"gates: installing Triton {version}", flush=True)
        half = BUILD / f"half-triton-{version}"
        shutil.rmtree(half, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", half, f"triton=={version}"]
        subprocess.run(command, check=True)
        for tool in (half / "triton" / "backends" / "nvidia" / "bin").iterdir():
            tool.chmod(0o755)
        half.rename(folder)
    return folder
