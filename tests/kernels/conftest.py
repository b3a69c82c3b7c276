"""Every kernel test runs on both CPU backends, with whatever a kernel leaves unwritten holding NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from headrace.engine.threads import sleep_when_idle

if TYPE_CHECKING:
    from headrace.kernels.backend import Backend

sleep_when_idle()  # which must be said before torch is imported: here that happens in functions


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill new tensors with NaN, or the largest integer, instead of whatever the memory held."""
    import torch

    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def best_ops() -> Backend:
    """The compiled kernels, or plain torch where there are none: for tests that take many draws."""
    from headrace.kernels.backend import choose_backend, open_library

    return choose_backend("auto", "cpu", open_library())


@pytest.fixture(params=["cpu", "torch"])
def ops(request: pytest.FixtureRequest) -> Backend:
    from headrace.kernels.backend import choose_backend, open_library
    from headrace.kernels.errors import BuildError

    library = open_library()
    if request.param == "cpu" and isinstance(library, BuildError):
        pytest.skip(f"no compiled kernels here: {library}")
    return choose_backend(request.param, "cpu", library)
