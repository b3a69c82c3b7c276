"""Where things run and how they are timed: a GPU, or, for a dry run, Triton's interpreter and a stand-in."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

import torch

from headrace.engine.device import CudaDevice, Device
from headrace.kernels.backend import Backend
from headrace.kernels.linear import any_rows

from ..sections import Cell

DRY = "dry run"
_cuda: Any = torch.cuda


@dataclass(frozen=True, slots=True)
class Pace:
    """How a measurement goes."""

    warm_ups: int
    runs: int
    flush_bytes: int  # several times the L2 cache of any GPU
    spins_per_s: int  # clock cycles: at the highest clocks a spin is not much shorter than asked for


class Tick(Protocol):
    """A moment in a device's line of work; see `torch.cuda.Event`."""

    def record(self) -> None:
        """Be the moment when all that is in the line is done."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds until another."""
        ...


class Ground(ABC):
    """What checks and measurements need of the place where they run."""

    device: torch.device
    dry: bool
    pace: Pace
    _flushed: torch.Tensor | None = None

    @abstractmethod
    def wait(self) -> None:
        """Return when all work is done. Raises what went wrong with it."""

    @abstractmethod
    def tick(self) -> Tick:
        """A moment that is not recorded yet."""

    @abstractmethod
    def spin(self, cycles: int) -> None:
        """Have the device do nothing for so many cycles, in its line."""

    @abstractmethod
    def figure(self, value: float) -> Cell:
        """A measured number as a report may show it."""

    @abstractmethod
    def line(self) -> Device:
        """A device for a runner."""

    @abstractmethod
    def watched(self, ops: Backend) -> Backend:
        """Operations as a runner may be given them here."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that may be taken."""

    def seconds(self, work: Callable[[], object], *, flush: bool = True) -> float:
        """The median time of some work on the device, its data not in the cache.

        The device spins until the host has put all of the work into its line, so that the host is no part of it.
        """
        for _ in range(self.pace.warm_ups):
            work()
        self.wait()
        begun_s = time.perf_counter()
        work()
        cycles = int((2 * (time.perf_counter() - begun_s) + 2e-4) * self.pace.spins_per_s)
        if self._flushed is None:
            self._flushed = torch.empty(self.pace.flush_bytes, dtype=torch.uint8, device=self.device)
        ticks: list[tuple[Tick, Tick]] = []
        for _ in range(self.pace.runs):
            begin, end = self.tick(), self.tick()
            if flush:
                self._flushed.zero_()
            self.spin(cycles)
            begin.record()
            work()
            end.record()
            ticks.append((begin, end))
        self.wait()
        return median(begin.elapsed_time(end) for begin, end in ticks) / 1e3


class Gpu(Ground):
    """A CUDA device."""

    dry = False
    pace = Pace(5, 20, 512 << 20, 2_000_000_000)

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def wait(self) -> None:
        """See `Ground`."""
        torch.cuda.synchronize()

    def tick(self) -> Tick:
        """See `Ground`."""
        return _cuda.Event(enable_timing=True)

    def spin(self, cycles: int) -> None:
        """See `Ground`."""
        _cuda._sleep(cycles)

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


class DryTick:
    """A `Tick` of the host's clock."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self) -> None:
        """See `Tick`."""
        self._at_s = time.perf_counter()

    def elapsed_time(self, end_event: DryTick) -> float:
        """See `Tick`."""
        return (end_event._at_s - self._at_s) * 1e3


class DryGround(Ground):
    """No GPU: the CPU, Triton's interpreter made strict, and no number that anyone could take for a measured one."""

    dry = True
    pace = Pace(0, 1, 1, 1)

    def __init__(self) -> None:
        from tests.support.interpreter import repair

        repair()
        self.device = torch.device("cpu")

    def wait(self) -> None:
        """See `Ground`."""

    def tick(self) -> Tick:
        """See `Ground`."""
        return DryTick()

    def spin(self, cycles: int) -> None:
        """See `Ground`."""

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


def open_ground(dry: bool) -> Ground:
    """The GPU in use, or what stands in for one."""
    return DryGround() if dry else Gpu()
