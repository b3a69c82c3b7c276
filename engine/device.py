"""A device that computes behind the host's back: a line of work, memory that both see, and graphs of recorded work.

Work is done in the order in which it was put into the line. Nothing here waits but `Mark.wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UPS = 3  # runs before a capture: libraries take memory and choose algorithms in their first ones


class Mark(Protocol):
    """A place in the line."""

    def wait(self) -> None:
        """Return when all work before it is done."""
        ...


class Graph(Protocol):
    """Work that was recorded once: the same operations on the same memory, whatever is in it."""

    def replay(self) -> None:
        """Put it into the line."""
        ...


class Device(Protocol):
    """What a runner needs of it."""

    device: torch.device
    capability: int  # 90 for sm_90

    def free_bytes(self) -> int:
        """Memory that can still be had."""
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Do something that uses the device, and wait; give the most memory that it held beyond what was held."""
        ...

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Give memory of the host, with anything in it, that `copy` may read and write later."""
        ...

    def put(self, work: Callable[[], None]) -> None:
        """Put operations on the device's tensors into the line. What they take from the host must not change."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy into the line; a tensor of the host must be pinned and left alone until the copy is done."""
        ...

    def mark(self) -> Mark:
        """Give the place behind all that is in the line."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record operations: `work` is called, a few times before it is recorded, and must not wait for the device."""
        ...


class CudaDevice:
    """An NVIDIA GPU; see `Device`. Its line is torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        major, minor = torch.cuda.get_device_capability(device)
        self.capability = 10 * major + minor
        self._pool = torch.cuda.graph_pool_handle()  # graphs are replayed one after the other: they may share memory

    def free_bytes(self) -> int:
        """See `Device`."""
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + kept

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """See `Device`. What libraries take beside torch is counted as well."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        held, free = torch.cuda.memory_allocated(self.device), self.free_bytes()
        work()
        torch.cuda.synchronize(self.device)
        beside = max(0, free - self.free_bytes() - torch.cuda.memory_allocated(self.device) + held)
        return torch.cuda.max_memory_allocated(self.device) - held + beside

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def put(self, work: Callable[[], None]) -> None:
        """See `Device`."""
        work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device`."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """See `Device`."""
        event = torch.cuda.Event()
        event.record()
        return _CudaMark(event)

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `Device`."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """See `Mark`."""
        self._event.synchronize()
