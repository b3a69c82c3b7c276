"""What decoding msgpack and decoding JSON have in common: the two ways to refuse, and maps without duplicate keys."""

from __future__ import annotations

from typing import Any, Final

from .errors import PayloadError, shown_name

MAX_NESTING: Final = 32  # the top map counts
INT_MIN: Final = -(1 << 63)
INT_MAX: Final = (1 << 64) - 1  # what msgpack can hold; fields have ranges of their own

TOO_DEEP: Final = f"nested deeper than {MAX_NESTING}"
NOT_A_STRING: Final = "a key that is not a string"
PAST_64_BITS: Final = "an integer past 64 bits"
EXTENSION: Final = "a msgpack extension"
TRAILING: Final = "trailing bytes after the payload"


class Flaw:
    """Stands in the decoded tree where something was that may not be, until the walk over the tree names its field."""

    __slots__ = ("key", "message")

    def __init__(self, message: str, key: str) -> None:
        self.message = message
        self.key = key  # the key at fault, '' if it cannot be shown


def invalid(message: str, param: str) -> PayloadError:
    """Decoded, but against the rules."""
    return PayloadError("invalid_request", message, param)


def undecodable(what: str, param: str) -> PayloadError:
    """No document at all."""
    return PayloadError("payload_undecodable", f"the payload is not {what}", param)


def map_of(pairs: list[tuple[Any, Any]]) -> dict[object, object] | Flaw:
    """The map of a decoder's pairs, or what is wrong with its keys."""
    try:
        fields = dict(pairs)
    except TypeError:  # a container as a key
        return Flaw(NOT_A_STRING, "")
    if len(fields) == len(pairs):
        return fields
    seen: set[object] = set()
    for key, _ in pairs:
        if key in seen:
            return Flaw("a duplicate key", shown_name(key) if isinstance(key, str) else "")
        seen.add(key)
    return fields
