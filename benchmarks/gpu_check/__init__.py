"""What a GPU is asked before anything is said about it: are the kernels right there, and how fast are they.

    make gpu-check                               on a machine with a GPU; under 8 minutes
    python -m benchmarks.gpu_check --dry-run     without: everything runs, tiny, in Triton's interpreter

Needs a checkout and a torch for CUDA with Triton, nothing else; `headrace` is this checkout, installed or not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def use_checkout() -> None:
    """Make the folders of this checkout the package `headrace`, as `package-dir` in pyproject.toml says."""
    if "headrace" not in sys.modules:
        package = ModuleType("headrace")
        package.__path__ = [str(Path(__file__).resolve().parents[2])]
        sys.modules["headrace"] = package


use_checkout()
