"""Kernels are compiled here, not interpreted, so these tests have a process of their own: `make gates`.

Triton asks once, when it is imported, whether its interpreter is wanted, as tests/gpu wants it. Whoever does not name
this folder, such as a run of all tests, gets none of these.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gates.versions import CACHE

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [Path(str(each).partition("::")[0]).resolve() for each in config.args]
    return None if any(each.is_relative_to(HERE) for each in named) else True


def pytest_configure() -> None:
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE))
