"""msgpack and JSON at the edge: decoded once, strictly, within bounds; inside, what comes out of here is trusted.

`unpack` gives a map of JSON types, or raises PayloadError. The code says which way a refused job goes:

- `payload_undecodable`: the bytes are no document at all: truncated, no msgpack or JSON, no UTF-8, a forged length.
- `invalid_request`: they are, but break a rule; `param` is the field of the top map in which that is. Faults of the
  whole payload name the job entry's field, `job` or `json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, cast

from . import _json, _msgpack
from ._edges import EXTENSION, INT_MAX, INT_MIN, MAX_NESTING, NOT_A_STRING, PAST_64_BITS, TOO_DEEP, Flaw, invalid
from .errors import PayloadError, shown_name

Kind = Literal["d", "json"]  # the field of a request's stream: "d" holds msgpack, "json" JSON text

MAX_PAYLOAD_BYTES: Final = 8 << 20

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def unpack(
    data: bytes, kind: Kind, *, max_bytes: int = MAX_PAYLOAD_BYTES, int_keys: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The map in `data`, of None, bool, int, float, str, list and dict only, with unique string keys.

    `int_keys` names the top fields whose map may have integers for keys, which only msgpack can. Raises PayloadError.
    """
    whole = "job" if kind == "d" else "json"
    if len(data) > max_bytes:
        raise invalid(f"the payload has {len(data)} bytes, more than {max_bytes}", whole)
    decoded = _msgpack.decode(data, whole) if kind == "d" else _json.decode(data, whole)
    if isinstance(decoded, Flaw):
        raise invalid(decoded.message, decoded.key or whole)
    if type(decoded) is not dict:
        raise invalid("the payload is not a map", whole)
    fields = cast("dict[object, Any]", decoded)
    for key, value in fields.items():
        if type(key) is not str:
            raise invalid(NOT_A_STRING, shown_name(str(key)) if type(key) is int else whole)
        if key in int_keys and type(value) is dict:
            message = _flaw_of_map(cast("dict[object, Any]", value), 2, int_keys=True)
        else:
            message = _flaw_of(key, 1) or _flaw_of(value, 2)
        if message is not None:
            raise invalid(message, shown_name(key))
    return cast("dict[str, Any]", fields)


_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)


def pack(fields: Mapping[str, Any], kind: Kind) -> bytes:
    """A map as msgpack ("d") or compact JSON ("json"). Raises PayloadError for what these cannot hold."""
    try:
        return _encode(fields, kind)
    except _UNENCODABLE as error:
        what = "msgpack" if kind == "d" else "JSON"
        raise PayloadError("invalid_request", f"a value that {what} cannot hold", _at_fault(fields, kind)) from error


def _encode(fields: Mapping[str, Any], kind: Kind) -> bytes:
    return _msgpack.encode(fields) if kind == "d" else _ENCODER.encode(fields).encode("utf-8")


def _at_fault(fields: Mapping[str, Any], kind: Kind) -> str | None:
    """The field that does not encode; None if it is the map as a whole."""
    for name, value in cast("Mapping[object, Any]", fields).items():
        if not isinstance(name, str):
            return None
        try:
            _encode({name: value}, kind)
        except _UNENCODABLE:
            return shown_name(name)
    return None


def json_num_bytes(value: object) -> int:
    """Length of a decoded value as compact JSON in UTF-8."""
    return len(_ENCODER.encode(value).encode("utf-8"))


def _flaw_of(value: object, depth: int) -> str | None:
    """What is wrong with a decoded value; None if nothing is. If it is a container, it stands `depth` deep."""
    look = _LOOKS.get(type(value))
    return EXTENSION if look is None else look(value, depth)


def _flaw_of_str(text: str, _depth: int) -> str | None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return "a lone surrogate"
    return None


def _flaw_of_int(number: int, _depth: int) -> str | None:
    return None if INT_MIN <= number <= INT_MAX else PAST_64_BITS


def _flaw_of_float(number: float, _depth: int) -> str | None:
    return None if math.isfinite(number) else "not a finite number"


def _flaw_of_list(items: list[Any], depth: int) -> str | None:
    if depth > MAX_NESTING:
        return TOO_DEEP
    if set(map(type, items)) == {int}:  # token ids: without a call for each
        return None if min(items) >= INT_MIN and max(items) <= INT_MAX else PAST_64_BITS
    for item in items:
        if (message := _flaw_of(item, depth + 1)) is not None:
            return message
    return None


def _flaw_of_map(fields: dict[object, Any], depth: int, int_keys: bool = False) -> str | None:
    if depth > MAX_NESTING:
        return TOO_DEEP
    for key, item in fields.items():
        if type(key) is not str and not (int_keys and type(key) is int):
            return NOT_A_STRING
        if (message := _flaw_of(key, depth) or _flaw_of(item, depth + 1)) is not None:
            return message
    return None


# Everything else that msgpack gives is an extension.
_LOOKS: dict[type, Callable[[Any, int], str | None]] = {
    str: _flaw_of_str,
    int: _flaw_of_int,
    float: _flaw_of_float,
    bool: lambda _value, _depth: None,
    type(None): lambda _value, _depth: None,
    list: _flaw_of_list,
    dict: _flaw_of_map,
    bytes: lambda _value, _depth: "binary data where text is asked",
    Flaw: lambda flaw, _depth: flaw.message,
}
