"""What Redis answers, in one shape: redis-py's differs with its version, the wire's (RESP2 or 3), and a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

Entry = tuple[bytes, Mapping[bytes, bytes]]  # id, fields


def entries(reply: Any) -> list[Entry]:
    """Of XRANGE and XREVRANGE."""
    return [(entry_id, _fields(fields)) for entry_id, fields in reply or ()]


def stream_entries(reply: Any) -> list[Entry]:
    """Of XREAD on one stream; none if it came back empty."""
    if not reply:
        return []
    if isinstance(reply, Mapping):  # RESP3
        (found,) = cast("Mapping[bytes, Any]", reply).values()
        # redis-py wraps the entries of a stream in a list of their own there, in some versions
        return entries(found[0] if found and isinstance(found[0], list) and _is_wrapped(found) else found)
    ((_, found),) = reply
    return entries(found)


def _is_wrapped(found: list[Any]) -> bool:
    first = cast("list[Any]", found[0])
    return not first or not isinstance(first[0], bytes)


def _fields(fields: Any) -> Mapping[Any, Any]:
    if not isinstance(fields, list):
        return cast("Mapping[Any, Any]", fields)
    flat = cast("list[Any]", fields)
    if len(flat) == 2:  # every entry of a request's stream: without the slices
        return {flat[0]: flat[1]}
    return dict(zip(flat[::2], flat[1::2], strict=True))


def script_ok(reply: Any) -> bool:
    """Of the append and the cancel script: whether it did what it was asked."""
    return int(reply[0]) == 1


def integer(reply: Any) -> int:
    """Of XLEN, EXISTS and the like."""
    return int(reply)


def time_ms(reply: Any) -> int:
    """Of TIME: the server's clock in ms since 1970."""
    seconds, microseconds = reply
    return int(seconds) * 1000 + int(microseconds) // 1000


def num_waiting(groups: Iterable[Any], group: str, length: int) -> int:
    """Of XINFO GROUPS: entries of a stream of `length` that no consumer of `group` has been given."""
    for found in groups:
        info = {_text(key): value for key, value in _fields(found).items()}
        if _text(info["name"]) == group:
            lag = info.get("lag")  # the server does not know it where entries in between were deleted
            return int(lag) if lag is not None else max(0, length - int(info["pending"]))
    return length


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
