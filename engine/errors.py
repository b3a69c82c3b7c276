"""Errors of the model side.

    ModelError                     something about the model or the machine stops the engine from starting
    ├── ModelNotFoundError         there is no such directory, hub model or configuration
    ├── UnsupportedModelError      the model asks for something that is not built or not compared (a ValueError)
    ├── WeightsError               a file of weights is missing, damaged, or does not fit the configuration
    └── MemoryBudgetError          the model or its cache does not fit into memory; names the setting to lower

A request that can never run is not here: the engine's `types.RequestRefusedError` says so to whoever added it.
"""

from __future__ import annotations


class ModelError(Exception):
    """The engine cannot start with this model; the message is one line for the person who started it.

    It may quote what stands in the model's files: what a terminal would obey, or take for another line, is escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message))


class ModelNotFoundError(ModelError):
    """There is no model at this place."""


class UnsupportedModelError(ModelError, ValueError):
    """The model needs `feature`, which is refused by name."""

    def __init__(self, feature: str, message: str) -> None:
        super().__init__(message)
        self.feature = feature


class WeightsError(ModelError):
    """Weights and configuration do not agree, or a file cannot be read. `names` are the tensors or files at fault."""

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names


class MemoryBudgetError(ModelError):
    """Not enough memory: `needed_bytes` against `available_bytes`."""

    def __init__(self, message: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
