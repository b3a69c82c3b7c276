"""Python's cyclic collector, set for a process that is nothing but a worker."""

from __future__ import annotations

import gc

# Objects made and not freed between two looks at the young ones; Python's own 700 is passed several times a step.
_YOUNG = 50_000


def settle_collector() -> None:
    """Call it once everything is loaded: what is there now stays, and is not looked at any more.

    What the step loop makes goes by its reference count, so the collector walks over a step's objects, and now and then
    over the half million of the model's libraries, and finds nothing; a full walk holds all streams up for tens of ms.
    Cycles that others leave behind are still found, only later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
