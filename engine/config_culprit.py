"""Which key of a configuration transformers stumbles over: its own errors often do not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

_MOST_TRIED = 200  # keys; real configurations have a third of them


def culprit(raw: Mapping[str, Any], said: str) -> str:
    """Name the key without which transformers would take a configuration that it refuses; empty if there is none.

    said  transformers' error: keys that it names come first
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.utils import logging

    mapping, model_type = cast("Any", CONFIG_MAPPING), raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in mapping:
        return "model_type"
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # or each attempt would repeat its warnings
    try:
        for path in sorted(_paths(raw), key=lambda path: path[-1] not in said)[:_MOST_TRIED]:
            if _is_taken(mapping[model_type], _without(raw, path)):
                return ".".join(path)
    finally:
        logging.set_verbosity(level)
    return ""


def _paths(raw: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Where each value stands: first those within objects, whose kind comes last."""
    for outer, value in raw.items():
        if isinstance(value, dict):
            inside = cast("dict[str, Any]", value)
            yield from ((outer, key) for key in sorted(inside, key=lambda name: name in ("rope_type", "type")))
    yield from ((key,) for key in raw)


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
