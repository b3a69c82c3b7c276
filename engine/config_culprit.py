"""Which key of a configuration transformers stumbles over: its own errors often do not say."""

from __future__ import annotations

from collections.abc import Mapping
from logging import CRITICAL
from typing import Any, cast

_MOST_TRIED = 200  # keys; real configurations have a third of them


def culprit(raw: Mapping[str, Any]) -> str:
    """Name the keys without which, each by itself, transformers would take a configuration that it refuses.

    "a" or "a or b", empty if there is none; one within an object comes alone.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.utils import logging

    mapping, model_type = cast("Any", CONFIG_MAPPING), raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in mapping:
        return "model_type"
    level = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)  # or each attempt would repeat its warnings
    try:
        if _is_taken(mapping[model_type], dict(raw)):  # it is something else that stumbles
            return ""
        taken = (path for path in _paths(raw) if _is_taken(mapping[model_type], _without(raw, path)))
        first = next(taken, ())
        others = [] if len(first) > 1 else [path[0] for path in taken]
    finally:
        logging.set_verbosity(level)
    return " or ".join([".".join(first), *others])


def _paths(raw: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Where each value stands, up to a number: first those within objects, whose kind comes last."""
    within: list[tuple[str, ...]] = []
    for outer, value in raw.items():
        if isinstance(value, dict):
            inside = cast("dict[str, Any]", value)
            within += ((outer, key) for key in sorted(inside, key=lambda name: name in ("rope_type", "type")))
    return [*within, *((key,) for key in raw)][:_MOST_TRIED]


def _without(raw: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    less = {name: each for name, each in raw.items() if name != path[0]}
    if len(path) == 1:
        return less
    return {**less, path[0]: _without(raw[path[0]], path[1:])}


def _is_taken(kind: Any, values: dict[str, Any]) -> bool:
    try:
        kind.from_dict(values)
    except Exception:  # noqa: BLE001  (whatever values that cannot be make transformers raise)
        return False
    return True
