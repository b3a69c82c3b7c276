"""Numbers of a configuration, each one that a model can have, or one error that names its key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ModelError

LEAST, MOST = 1e-6, 1e12  # of factors, bases and caps: beyond them float32 comes to an end within a few products


def number(
    values: Mapping[str, Any], key: str, default: float | None = None, *, least: float = LEAST, most: float = MOST
) -> float:
    """Give a number from `least` to `most`; what is missing or null is the default, if there is one.

    Raises ModelError.
    """
    value: object = values.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise ModelError(f"config.json says {key} = {value!r}; it must be a number from {least:g} to {most:g}.")
    return float(value)


def whole(values: Mapping[str, Any], key: str, other_name: str = "") -> int:
    """Give a whole number above 0, which a file may have under another name as well. Raises ModelError."""
    value: object = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        called = f"{key} (or {other_name})" if other_name else key
        raise ModelError(f"config.json says {called} = {value!r}; it must be a whole number above 0.")
    return value


def flag(values: Mapping[str, Any], key: str, default: bool) -> bool:
    """Give a truth value; what is missing is the default, and null is none. Raises ModelError."""
    value: object = values.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"config.json says {key} = {value!r}; it must be true or false.")
    return value
