"""JSON text to a tree of Python values: NaN and infinities, endless integers and endless nesting end in an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from ._edges import INT_MAX, MAX_NESTING, TOO_DEEP, TRAILING, invalid, map_of, undecodable
from .errors import shown_name

_SPACE = " \t\n\r"
_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*+)"|[\[\]{}]', re.DOTALL)


def decode(data: bytes, whole: str) -> object:
    """The value in `data`. NaN and infinities are left in it for the walk, which can name their field.

    Raises PayloadError; `whole` is what it names where the fault is not in one field.
    """
    try:
        # Not json.loads on bytes, which would also take UTF-16 and UTF-32. Surrogates are found by the walk.
        text = data.decode("utf-8", "surrogatepass").lstrip(_SPACE)
    except UnicodeDecodeError as error:
        raise undecodable("JSON in UTF-8", whole) from error
    try:
        decoded, end = _decode(text)
    except ValueError as error:
        raise undecodable("JSON", whole) from error
    except RecursionError as error:
        raise invalid(TOO_DEEP, _deep_field(text, whole)) from error
    if text[end:].strip(_SPACE):
        raise invalid(TRAILING, whole)
    return decoded


def _decoder(parse_int: Callable[[str], int] | None = None) -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=map_of, parse_int=parse_int)


def _bounded_int(digits: str) -> int:
    return int(digits) if len(digits) <= 20 else INT_MAX + 1


_DECODER = _decoder()
_BOUNDED_DECODER = _decoder(_bounded_int)


def _decode(text: str) -> tuple[object, int]:
    try:
        return _DECODER.raw_decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of more digits than Python reads: again, so that the walk can name its field
        return _BOUNDED_DECODER.raw_decode(text)


def _deep_field(text: str, whole: str) -> str:
    """The field of the top map in which text is nested too deep: the decoder gave up without saying."""
    depth, field = 0, whole
    for match in _TOKEN.finditer(text):
        bracket = match[0]
        if bracket[0] == '"':
            if depth == 1:
                field = shown_name(match[1])
        elif bracket in "[{":
            depth += 1
            if depth > MAX_NESTING:
                break
        else:
            depth -= 1
    return field
