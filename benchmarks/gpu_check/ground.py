"""Where things run and how they are timed: a GPU, or, for a dry run, Triton's interpreter and a stand-in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

import torch

from headrace.engine.device import CudaDevice, Device
from headrace.kernels.backend import Backend
from headrace.kernels.matrix import Matrix

from ..sections import Cell

LEAST_RUNS, WARM_UPS = 20, 5
FLUSH_BYTES = 512 << 20  # several times the L2 cache of any GPU
DRY = "dry run"
_SPINS_PER_S = 2_000_000_000  # clock cycles: at the highest clocks a spin is not much shorter than asked for


class Ground(Protocol):
    """What checks and measurements need of the place where they run."""

    device: torch.device
    dry: bool

    def wait(self) -> None:
        """Return when all work is done. Raises what went wrong with it."""
        ...

    def seconds(self, work: Callable[[], object], *, flush: bool = True, runs: int = LEAST_RUNS) -> float:
        """The median time of some work on the device, its data not in the cache."""
        ...

    def figure(self, value: float) -> Cell:
        """A measured number as a report may show it."""
        ...

    def line(self) -> Device:
        """A device for a runner."""
        ...

    def watched(self, ops: Backend) -> Backend:
        """Operations as a runner may be given them here."""
        ...

    def free_bytes(self) -> int:
        """Memory that may be taken."""
        ...


class Gpu:
    """A CUDA device."""

    dry = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._flush: torch.Tensor | None = None

    def wait(self) -> None:
        """See `Ground`."""
        torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], *, flush: bool = True, runs: int = LEAST_RUNS) -> float:
        """See `Ground`. The device spins until the host has put all of the work into its line."""
        cuda: Any = torch.cuda
        for _ in range(WARM_UPS):
            work()
        self.wait()
        begun_s = time.perf_counter()
        work()
        spins = int((2 * (time.perf_counter() - begun_s) + 2e-4) * _SPINS_PER_S)
        if flush and self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        marks: list[tuple[Any, Any]] = []
        for _ in range(runs):
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            if flush and self._flush is not None:
                self._flush.zero_()
            cuda._sleep(spins)
            begin.record()
            work()
            end.record()
            marks.append((begin, end))
        self.wait()
        return median(begin.elapsed_time(end) for begin, end in marks) / 1e3

    def figure(self, value: float) -> Cell:
        """See `Ground`."""
        return float(value)

    def line(self) -> Device:
        """See `Ground`."""
        return CudaDevice(self.device)

    def watched(self, ops: Backend) -> Backend:
        """See `Ground`."""
        return ops

    def free_bytes(self) -> int:
        """See `Ground`."""
        return torch.cuda.mem_get_info()[0]


class DryGround:
    """No GPU: the CPU, Triton's interpreter made strict, and no number that anyone could take for a measured one."""

    dry = True

    def __init__(self) -> None:
        from tests.support.interpreter import repair

        repair()
        self.device = torch.device("cpu")

    def wait(self) -> None:
        """See `Ground`."""

    def seconds(self, work: Callable[[], object], *, flush: bool = True, runs: int = LEAST_RUNS) -> float:
        """See `Ground`: once is enough to see that it runs."""
        del flush, runs
        begun_s = time.perf_counter()
        work()
        return time.perf_counter() - begun_s

    def figure(self, value: float) -> Cell:
        """See `Ground`."""
        del value
        return DRY

    def line(self) -> Device:
        """See `Ground`."""
        from tests.support.stand_in import StandIn

        return StandIn("random")

    def watched(self, ops: Backend) -> Backend:
        """See `Ground`. What packs numbers of the host is one launch: its memory and the device's are the same here."""
        from tests.support.watched_work import as_kernel

        return replace(
            ops,
            sample=as_kernel(ops.sample),
            adjust=as_kernel(ops.adjust),
            logprobs=as_kernel(ops.logprobs),
            copy_blocks=as_kernel(ops.copy_blocks),
            row_multiple=any_rows,  # rows of padding take their time too
        )

    def free_bytes(self) -> int:
        """See `Ground`."""
        return 1 << 30


def any_rows(matrix: Matrix) -> int:
    """A `row_multiple` for which no rows are padded."""
    del matrix
    return 1


def open_ground(dry: bool) -> Ground:
    """The GPU in use, or what stands in for one."""
    return DryGround() if dry else Gpu()
