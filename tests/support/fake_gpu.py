"""A driver for GPUs that are not there: launches of Triton kernels become compilations for them.

    with fake_gpu(90) as compiled:
        some_launcher(tensors on the CPU)
    compiled[0].registers

The launchers are the real ones, called with CPU tensors; nothing is computed. Not under TRITON_INTERPRET. Other targets
than one in the same process are kept apart by the number of the device, under which Triton remembers what it compiled.
"""

# pyright: basic
# (Triton has few types)

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what is unset changes its meaning from one Triton to the next

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One launch, and what was compiled for it or found compiled."""

    kernel: str
    binary: str  # Triton's hash of all that it was compiled from: the same is the same binary
    registers: int  # of a thread
    stack_bytes: int  # of a thread; above 0: registers were spilled, or an array is indexed
    shared_bytes: int  # of a program
    tensor_columns: int  # of a program's tensor memory, which only sm_100 has
    num_warps: int
    ptx: str
    ttgir: str  # Triton's own form, in which loops and buffers still have names


class _Driver:
    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        del device
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


_resources: dict[str, tuple[int, int]] = {}


def _usage(binary: Any) -> tuple[int, int]:
    if binary.hash not in _resources:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
        _resources[binary.hash] = found["REG"], found["STACK"] + found["LOCAL"]
    return _resources[binary.hash]


@contextlib.contextmanager
def fake_gpu(capability: int) -> Iterator[list[Compiled]]:
    """Compile for sm_`capability` (80, 89, 90, 100 …) what is launched inside, one entry a launch."""
    seen: list[Compiled] = []

    def getitem(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            binary = kernel.run(*args, grid=grid, warmup=True, **options)
            registers, stack = _usage(binary)
            data = binary.metadata
            seen.append(
                Compiled(
                    kernel.fn.__name__,
                    binary.hash,
                    registers,
                    stack,
                    data.shared,
                    getattr(data, "tmem_size", 0) or 0,
                    data.num_warps,
                    binary.asm["ptx"],
                    binary.asm["ttgir"],
                )
            )
            return binary

        return launch

    owners = [owner for owner in (KernelInterface, JITFunction) if "__getitem__" in vars(owner)]
    before = [vars(owner)["__getitem__"] for owner in owners]
    active = driver._active  # where there is no GPU, asking for the active one is an error
    driver.set_active(_Driver(capability))  # type: ignore[arg-type]
    for owner in owners:
        owner.__getitem__ = getitem
    try:
        yield seen
    finally:
        for owner, original in zip(owners, before, strict=True):
            owner.__getitem__ = original
        driver._active = active
