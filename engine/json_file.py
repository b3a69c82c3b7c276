"""Reads the small JSON files of a checkpoint, which may be anything: bounded in size, with finite numbers only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

from .errors import ModelError

MOST_CONFIG_BYTES = 4 << 20  # real ones have some thousands
MOST_INDEX_BYTES = 16 << 20  # room for 150 000 names; a value in Python takes twenty times its text


def is_file(path: Path) -> bool:
    """Whether there is a regular file, through links; no for a loop of links and for a name that none can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def find_folder(name: str | Path) -> Path | None:
    """The folder of this name, `~` being a home; None if there is none, and for a name that none can have."""
    try:
        path = Path(name).expanduser()
        return path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):
        return None


def read_json(path: Path, most_bytes: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """Read one JSON object of at most `most_bytes`.

    Raises ModelError where the file holds something else, is larger, is nested too deeply, or has a number that is
    not finite.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ModelError(f"{path} has more than {most_bytes >> 20} MiB, so it is no such file of a model.")
        value = parse_json(content)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return cast("dict[str, Any]", value)


def parse_json(content: bytes, *, unique: bool = False) -> object:
    """Parse UTF-8 JSON with finite numbers, and if asked for, names that stand once in each object.

    Raises ValueError, or RecursionError where it is nested too deeply.
    """
    pairs_hook = _unique if unique else None
    return json.loads(
        content.decode("utf-8"), parse_constant=_refuse_number, parse_float=_finite, object_pairs_hook=pairs_hook
    )


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text[:20])


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {twice[:100]!r} stands there twice")
    return made
