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


def sleep_when_idle() -> None:
    """Have arithmetic threads sleep while there is nothing to do, rather than spin.

    A spinning thread on a core that another process needs costs milliseconds at every barrier. This takes effect only
    if torch has not been imported yet; an OMP_WAIT_POLICY that is set already is kept.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def configure_threads(num_threads: int | None = None) -> int:
    """Set torch's threads for arithmetic (None: one per available core), and return how many there are.

    If torch has not been imported yet, idle threads are made to sleep (`sleep_when_idle`).

    Raises:
        ValueError: num_threads is below 1.
    """
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"the number of threads must be at least 1, not {num_threads}")
    sleep_when_idle()
    import torch

    torch.set_num_threads(num_threads or available_cores())
    return torch.get_num_threads()
