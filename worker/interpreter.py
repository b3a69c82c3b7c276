"""Python itself, set for a process that is nothing but a worker."""

from __future__ import annotations

import gc
import sys

# Objects made and not freed between two looks at the young ones; Python's own 700 is passed several times a step.
_YOUNG = 50_000
# How long another thread, such as one that tokenises, may go on when the step loop comes back from a wait. Python's own
# 5 ms is longer than many a step.
_SWITCH_INTERVAL_S = 0.0005


def settle_interpreter() -> None:
    """Call it once everything is loaded: what is there now stays, and the collector looks at it no more.

    What the step loop makes goes by its reference count, so the collector walks over a step's objects, and now and then
    over the half million of the model's libraries, and finds nothing; a full walk holds all streams up for tens of ms.
    Cycles that others leave behind are still found, only later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
