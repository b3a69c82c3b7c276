"""Durations and sizes as people write them: `30s`, `5m`, `250ms`, `1m30s`; `8MiB`, `64KB`."""

from __future__ import annotations

import re

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_DURATION = re.compile(rf"(?:{_NUMBER}(?:ms|s|m|h|d))+")
_DURATION_PART = re.compile(rf"({_NUMBER})(ms|s|m|h|d)")
_SIZE = re.compile(rf"({_NUMBER})\s*([kmg]?i?b)", re.IGNORECASE)


def parse_duration_s(value: object) -> object:
    """Seconds of a text such as `1m30s`; a plain number is seconds. What is no text is given back as it is.

    Raises ValueError for any other text.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if re.fullmatch(_NUMBER, text):
        return float(text)
    if not _DURATION.fullmatch(text):
        raise ValueError("not a duration")
    # round: 0.1 * 3 and the like would otherwise print as 0.30000000000000004
    return round(sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text)), 6)


def parse_size_bytes(value: object) -> object:
    """Bytes of a text such as `8MiB`; a plain number is bytes. What is no text is given back as it is.

    Raises ValueError for any other text.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.isascii() and text.isdigit():
        return int(text)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("not a size")
    return int(float(match[1]) * _BYTES[match[2].lower()])


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration_s` reads back: 300 is `5m`, 0.25 is `250ms`."""
    if seconds and seconds < 1:
        return f"{seconds * 1000:g}ms"
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds:g}s"


def format_size(num_bytes: int) -> str:
    """The shortest text that `parse_size_bytes` reads back: 8388608 is `8MiB`."""
    for unit, name in (("gib", "GiB"), ("mib", "MiB"), ("kib", "KiB")):
        if num_bytes and num_bytes % _BYTES[unit] == 0:
            return f"{num_bytes // _BYTES[unit]}{name}"
    return str(num_bytes)


def show_bytes(num_bytes: float) -> str:
    """For people: `812 B`, `1.4 KiB`, `3.2 GiB`."""
    for unit, name in (("gib", "GiB"), ("mib", "MiB"), ("kib", "KiB")):
        if num_bytes >= _BYTES[unit]:
            return f"{num_bytes / _BYTES[unit]:.1f} {name}"
    return f"{num_bytes:.0f} B"
