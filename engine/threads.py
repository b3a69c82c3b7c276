"""How many CPU threads the model's arithmetic uses, and how they wait.

Importing torch starts its thread runtime, which reads its environment then: call `configure_threads` before that
where you can.
"""

from __future__ import annotations

import os
import sys


def available_cores() -> int:
    """CPU cores that this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def configure_threads(num_threads: int | None = None) -> int:
    """Set torch's threads for arithmetic (None: one per available core), and return how many there are.

    Threads that have nothing to do are to sleep rather than to spin: a spinning thread on a core that another process
    needs costs milliseconds at every barrier. That takes effect only if torch has not been imported yet.

    Raises:
        ValueError: num_threads is below 1.
    """
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"the number of threads must be at least 1, not {num_threads}")
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    torch.set_num_threads(num_threads or available_cores())
    return torch.get_num_threads()
