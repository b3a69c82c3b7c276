"""The engine: continuous batching over a paged KV cache.

Names are imported when they are first used, so `headrace.engine` itself costs nothing: only `load_engine` and what is
behind it bring in torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine
    from .types import (
        ChoiceOutput,
        EngineConfig,
        EngineStats,
        Finish,
        ModelInfo,
        Request,
        RequestRefusedError,
        SamplingOptions,
        StepOutput,
    )

_HOME = {
    "Engine": "engine",
    "ChoiceOutput": "types",
    "EngineConfig": "types",
    "EngineStats": "types",
    "Finish": "types",
    "ModelInfo": "types",
    "Request": "types",
    "RequestRefusedError": "types",
    "SamplingOptions": "types",
    "StepOutput": "types",
}

__all__ = [
    "ChoiceOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Finish",
    "ModelInfo",
    "Request",
    "RequestRefusedError",
    "SamplingOptions",
    "StepOutput",
]


def __getattr__(name: str) -> object:
    """Import a public name from the module it lives in."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    """Public names, for completion."""
    return __all__
