"""The engine: continuous batching over a paged KV cache.

Names are imported when they are first used, so that `headrace.engine` itself costs nothing: only `LLM` and
`load_engine` bring in torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine
    from .generate import LLM, Completion, load_engine
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
    "LLM": "generate",
    "Completion": "generate",
    "load_engine": "generate",
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
    "LLM",
    "ChoiceOutput",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Finish",
    "ModelInfo",
    "Request",
    "RequestRefusedError",
    "SamplingOptions",
    "StepOutput",
    "load_engine",
]


def __getattr__(name: str) -> object:
    """Import a public name from the module it lives in."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    """Public names, for completion."""
    return __all__
