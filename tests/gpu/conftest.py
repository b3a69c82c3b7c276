"""Triton's kernels, run by its interpreter: which must be said before Triton is imported anywhere in the process."""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.engine.threads import sleep_when_idle

sleep_when_idle()


def pytest_sessionfinish() -> None:
    """Leave what was found of errors in the folder that KERNEL_ERRORS names, a file for each process."""
    from tests.support.tolerances import FOUND

    if FOUND and (folder := os.environ.get("KERNEL_ERRORS")):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(FOUND))


@pytest.fixture(autouse=True)
def strict_interpreter() -> Iterator[None]:
    """Repair the interpreter, and fill new tensors with NaN, or the largest integer."""
    import torch

    from tests.support.interpreter import repair

    repair()
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
