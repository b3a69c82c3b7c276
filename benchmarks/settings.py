"""What one invocation measures with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from . import models
from .pairs import LEAST_PAIRS
from .processes import fresh
from .workloads import WORKLOADS

T = TypeVar("T")

Say = Callable[[str], None]  # told of each run before it begins


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of all benchmarks. `quick` shows that everything works and measures nothing worth quoting."""

    models_dir: Path
    quick: bool = False
    pairs: int = LEAST_PAIRS
    budget: int = 512  # most tokens in one step; the worker's own default

    def model(self, name: str) -> Path:
        """A checkpoint's folder; written if it is not there."""
        return models.ensure(name, self.models_dir)

    def limit(self, quick: int) -> tuple[str, ...]:
        """Arguments that cut a workload down to `quick` requests in a quick run."""
        return ("--limit", str(quick)) if self.quick else ()


def dtype_of(model: str) -> str:
    """The type that a checkpoint is measured in: its own, in which the peers run it too."""
    return "bfloat16" if model in ("smol135", "tiny2") else "auto"


def fresh_workload(kind: type[T], module: str, settings: Settings, workload: str, quick_limit: int) -> T:
    """Run a workload by a module in a new process. `quick_limit` requests are left of it in a quick run."""
    model = WORKLOADS[workload].model
    return fresh(
        kind, module, workload, "--model", settings.model(model), "--dtype", dtype_of(model),
        "--budget", settings.budget, *settings.limit(quick_limit),
    )  # fmt: skip
