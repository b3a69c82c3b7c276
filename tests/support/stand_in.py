"""A device without a GPU that does what a GPU may do at the worst moment; see `engine.device.Device`.

It judges. `DeviceFaultError` is raised, at the latest when a mark is waited for, where

* pinned memory is changed by the host between a copy and the moment at which it is done;
* a copy between host and device is not of one shape and type and contiguous, or both its sides are the host's;
* work that was put, or is captured, touches pinned memory, makes the host wait or uses the device itself;
* a capture draws random numbers, brings in data of the host, takes addresses, or moves or reshapes a tensor;
* the host reads what is known to be the device's memory, within `host_reads_are_errors`.

Memory of the host into which a copy is under way has NaN or the smallest integer in it until then; so has memory of a
graph between capture and replay, and each `empty` in it at each replay. As on a GPU the warm-ups of a capture are done
and the recorded run is not.

What it cannot see, since all its memory is the host's: `.to("cpu")`; a copy from host memory that is not pinned; reads
of memory that no work has touched yet; work that the host does on the device's memory outside of the line.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.engine.device import WARM_UPS

from .stand_in_graph import Recorder
from .watched_work import (
    ADDRESS,
    DeviceFaultError,
    Launch,
    Operation,
    Watch,
    bits,
    makes_the_host_wait,
    poison,
    tensors_in,
    watching,
)

Pace = Literal["lazy", "eager", "random"]
PACES: tuple[Pace, ...] = ("lazy", "eager", "random")


@dataclass(frozen=True, eq=False)
class _HostSide:
    """Of a copy that is in the line."""

    tensor: torch.Tensor
    writes: bool
    before: torch.Tensor | None  # its bytes, which must not change; None where another copy may change them

    def check(self) -> None:
        if self.before is not None and not torch.equal(bits(self.tensor), self.before):
            shape, way = list(self.tensor.shape), "to" if self.writes else "from"
            raise DeviceFaultError(f"pinned memory {shape} was changed while a copy {way} it was in the line")

    def clashes(self, tensor: torch.Tensor, *, writes: bool) -> bool:
        (begin, end), (other, other_end) = _span(self.tensor), _span(tensor)
        return (writes or self.writes) and begin < other_end and other < end


class StandIn:
    """Implements `Device`. Work is done when a mark behind it is waited for, at once, or at random in between."""

    def __init__(self, pace: Pace = "lazy", seed: int = 0) -> None:
        self.device = torch.device("cpu")
        self.pace = pace
        self.capability, self.free, self.peak = 90, 1 << 30, 0  # free memory; what `peak_bytes` is to say
        self.captures = self.replays = self.executed = 0  # executed: entries of the line, failed ones too
        self._random = random.Random(seed)
        self._line: deque[Callable[[], None]] = deque()
        self._busy = False  # in work
        self._pinned: list[tuple[int, int, StorageWeakRef]] = []  # from where to where, as long as it lives
        self._in_line: list[_HostSide] = []
        self._memory: dict[int, StorageWeakRef] = {}  # the device's, as far as known; as keys they are not used again

    def free_bytes(self) -> int:
        """See `Device`."""
        return self.free

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """See `Device`."""
        work()
        self.run_until(self.executed + len(self._line))
        return self.peak

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        made = torch.zeros(shape, dtype=dtype)
        self._pinned = [each for each in self._pinned if not each[2].expired()]
        self._pinned.append((*_span(made), StorageWeakRef(made.untyped_storage())))
        return made

    def put(self, work: Callable[[], None]) -> None:
        """See `Device`."""
        self._append(partial(self._work, work))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device`."""
        self._refuse_if_busy()
        host = [each for each in (target, source) if self._is_pinned(each)]
        self._remember([each for each in (target, source) if not self._is_pinned(each)])
        if not host:
            self._append(partial(target.copy_, source))
            return
        whole = target.is_contiguous() and source.is_contiguous()
        if len(host) > 1 or (target.shape, target.dtype) != (source.shape, source.dtype) or not whole:
            raise DeviceFaultError("a copy that waits: from host to host, or not of one shape and type and contiguous")
        writes = host[0] is target
        known = not any(each.clashes(host[0], writes=writes) for each in self._in_line)
        if known and writes:
            poison(target)
        side = _HostSide(host[0], writes, bits(host[0]) if known else None)
        self._in_line.append(side)
        self._append(partial(self._copy, target, source, side))

    def mark(self) -> StandInMark:
        """See `Device`."""
        self._refuse_if_busy()
        self._advance()
        return StandInMark(self, self.executed + len(self._line))

    def capture(self, work: Callable[[], None]) -> StandInGraph:
        """See `Device`."""
        self._refuse_if_busy()
        self.run_until(self.executed + len(self._line))
        with self._being_busy():
            for _ in range(WARM_UPS):
                self._work(work)
            recorder = Recorder(self._see, self._remember)
            try:
                with watching(recorder, partial(self._see_captured_call, recorder), partial(self._record, recorder)):
                    work()
            finally:
                recorder.undo()
        self.captures += 1
        return StandInGraph(self, recorder)

    def replay(self, graph: StandInGraph) -> None:
        """Put a graph into the line."""
        self._append(graph.recorder.run)
        self.replays += 1

    def run_until(self, place: int) -> None:
        """Wait until so many entries are done, of all that there ever were."""
        self._refuse_if_busy()
        while self.executed < place:
            self._run()
        self._advance()

    @contextmanager
    def host_reads_are_errors(self) -> Iterator[None]:
        """Within, on this thread, reading memory that work or copies have touched is an error, unless it is pinned.

        Work that was only put is not known to touch anything before it is done: the pace "eager" sees most.
        """
        with watching(Watch(self._see_host), self._see_host_call, lambda launch, call: launch.run(call)):
            yield

    def _append(self, entry: Callable[[], Any]) -> None:
        self._refuse_if_busy()
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self._line.append(partial(self._in_modes, *modes, entry))
        self._advance()

    def _in_modes(self, inference: bool, grad: bool, entry: Callable[[], Any]) -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            entry()

    def _advance(self) -> None:
        count = 0 if self.pace == "lazy" else len(self._line)
        for _ in range(self._random.randint(0, count) if self.pace == "random" else count):
            self._run()

    def _run(self) -> None:
        entry = self._line.popleft()
        self.executed += 1
        with self._being_busy():
            entry()

    @contextmanager
    def _being_busy(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _refuse_if_busy(self) -> None:
        if self._busy:
            raise DeviceFaultError("work may not use the device that it is done by")

    def _work(self, work: Callable[[], None]) -> None:
        with watching(Watch(self._see, self._remember), self._see_call, self._launch):
            work()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, side: _HostSide) -> None:
        self._in_line.remove(side)
        side.check()
        target.copy_(source)

    def _see(self, func: Operation, args: Any, kwargs: Any) -> None:
        if makes_the_host_wait(func, args, kwargs):
            raise DeviceFaultError(f"{func} makes the host wait for the device")
        self._touch(str(func), tensors_in((args, kwargs)))

    def _see_call(self, name: str, tensor: torch.Tensor) -> None:
        if name != ADDRESS:
            raise DeviceFaultError(f"{name} makes the host wait for the device")
        self._touch(name, [tensor])

    def _see_captured_call(self, recorder: Recorder, name: str, tensor: torch.Tensor) -> None:
        recorder.see_call(name)
        self._see_call(name, tensor)

    def _launch(self, launch: Launch, call: Any) -> None:
        self._touch(launch.name, tensors_in((launch.args, launch.options)))
        launch.run(call)

    def _record(self, recorder: Recorder, launch: Launch, call: Any) -> None:
        self._touch(launch.name, tensors_in((launch.args, launch.options)))
        recorder.launch(launch, call)

    def _see_host(self, func: Operation, args: Any, kwargs: Any) -> None:
        if makes_the_host_wait(func, args, kwargs):
            self._refuse_device_memory(str(func), tensors_in((args, kwargs)))

    def _see_host_call(self, name: str, tensor: torch.Tensor) -> None:
        if name != ADDRESS:
            self._refuse_device_memory(name, [tensor])

    def _refuse_device_memory(self, name: str, tensors: list[torch.Tensor]) -> None:
        for each in tensors:
            if each.untyped_storage()._cdata in self._memory:
                raise DeviceFaultError(f"{name}: the host reads the device's memory")

    def _touch(self, name: str, tensors: list[torch.Tensor]) -> None:
        if any(self._is_pinned(each) for each in tensors):
            raise DeviceFaultError(f"{name} touches pinned memory: only a copy may")
        self._remember(tensors)

    def _remember(self, tensors: list[torch.Tensor]) -> None:
        for each in tensors:
            storage = each.untyped_storage()
            if storage._cdata not in self._memory:
                self._memory[storage._cdata] = StorageWeakRef(storage)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr()  # of memory that went through NumPy it may lie within
        return any(begin <= at < end and not alive.expired() for begin, end, alive in self._pinned)


@dataclass(frozen=True)
class StandInMark:
    """Implements `Mark`."""

    device: StandIn
    place: int

    def wait(self) -> None:
        """See `Mark`."""
        self.device.run_until(self.place)


@dataclass(frozen=True, eq=False)
class StandInGraph:
    """Implements `Graph`."""

    device: StandIn
    recorder: Recorder

    @property
    def ops(self) -> list[str]:
        """Names of what was recorded, in order: torch's operations as "aten.mm.default", kernels as "_gated"."""
        return self.recorder.names

    def replay(self) -> None:
        """See `Graph`."""
        self.device.replay(self)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
