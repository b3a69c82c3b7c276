"""Memory for a KV cache on the CPU."""

from __future__ import annotations

import math
import mmap

import torch


def zeros_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Give a tensor of zeros on the CPU, in large pages where the system has them; memory is taken as it is written.

    A cache is read block by block all over its length, and with pages of 4 KiB looking up the addresses costs decode
    attention a quarter of its time (measured on one machine with bfloat16 blocks of 6 KiB: 2.9 against 2.3 ms a layer).
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without large pages: small ones give the same results
            return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
