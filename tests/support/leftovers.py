"""What is left of requests after their end: objects alive, and how many objects hang on an engine or a worker."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable

_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.FrameType)


def alive(kinds: Iterable[type], prefix: str) -> list[object]:
    """Objects of these classes that belong to a request whose `request_id` begins with `prefix`."""
    gc.collect()
    wanted = set(kinds)  # by their very type: isinstance wakes proxies that other packages keep
    found = (one for one in gc.get_objects() if type(one) in wanted)
    return [one for one in found if str(getattr(one, "request_id", "")).startswith(prefix)]


def num_reachable(root: object) -> int:
    """How many containers hang on an object: what must not grow with the number of requests that are over.

    Modules, classes and functions do not count, nor what hangs on them alone.
    """
    gc.collect()
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _SHARED) or not gc.is_tracked(one):
            continue
        seen.add(id(one))
        waiting += gc.get_referents(one)
    return len(seen)
