"""Entries of a request's stream: typed events to bytes and back. Every name of a field on the wire is in this file.

The maps keep the order of the protocol's table, and leave out what is absent, so that equal events are equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from ._tokens import decode_tokens
from .errors import InvalidJobError, MalformedEntryError
from .events import (
    EntryId,
    ErrorInfo,
    Event,
    Finished,
    JobRef,
    ModelRef,
    Queued,
    Reason,
    Released,
    Started,
    Timing,
    TokenLogprobs,
    Tokens,
    Usage,
)
from .payload import Kind, pack, unpack

_REASONS: Final = frozenset({"stop", "length", "cancelled", "deadline", "error"})
_MAX_DIGITS: Final = 20
_MAX_ENTRY_BYTES: Final = 1 << 29  # what Redis can hold: whatever a worker has written is read


def parse_id(raw: bytes | str) -> EntryId:
    """(A, K) of `A-K`. Raises ValueError for anything else."""
    # bytes.isdigit knows ASCII's digits only; what is beyond ASCII becomes a question mark
    attempt, _, counter = (raw if isinstance(raw, bytes) else raw.encode("ascii", "replace")).partition(b"-")
    if attempt.isdigit() and counter.isdigit() and len(attempt) <= _MAX_DIGITS and len(counter) <= _MAX_DIGITS:
        return int(attempt), int(counter)
    raise ValueError("not the id of a stream entry")


def format_id(entry_id: EntryId) -> str:
    """`A-K` of (A, K)."""
    return f"{entry_id[0]}-{entry_id[1]}"


# --- to the wire ------------------------------------------------------------------------------------------------------


def encode(fields: Mapping[str, Any], kind: Kind) -> tuple[str, bytes]:
    """(field, payload) of an entry: ARGV 3 and 4 of the append script. Raises PayloadError."""
    return kind, pack(fields, kind)


def to_map(event: Event) -> dict[str, Any]:
    """The map of an event. Its id is not in it: that is the entry's."""
    match event:
        case Queued():
            return {"e": "queued", "fp": event.fp}
        case Started():
            return _started_map(event)
        case Tokens():
            return tokens_map(
                event.index, event.token_ids, event.text, event.choice, event.logprobs, event.prompt_logprobs
            )
        case Released():
            return {"e": "released"}
        case Finished():
            return _finished_map(event)


def tokens_map(
    index: int,
    token_ids: Sequence[int],
    text: str = "",
    choice: int = 0,
    logprobs: Sequence[TokenLogprobs] | None = None,
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None,
) -> dict[str, Any]:
    """The map of a `tokens` entry, without an event in between: a worker makes one for every token."""
    fields: dict[str, Any] = {"e": "tokens", "i": index, "t": token_ids}
    if text:
        fields["x"] = text
    if choice:
        fields["c"] = choice
    if logprobs is not None:
        fields["lp"] = logprobs
    if prompt_logprobs is not None:
        fields["plp"] = prompt_logprobs
    return fields


def _started_map(event: Started) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "e": "started",
        "attempt": event.attempt,
        "worker": event.worker,
        "job": f"{event.job.key} {event.job.entry_id}",
        "resumed": event.resumed,
        "seed": event.seed,
        "fp": event.fp,
        "model": {"name": event.model.name, "fingerprint": event.model.fingerprint},
    }
    if event.metadata is not None:
        fields["metadata"] = event.metadata
    return fields


def _finished_map(event: Finished) -> dict[str, Any]:
    chunk: dict[str, Any] = {"e": "finished"}
    if event.index is not None:
        chunk = tokens_map(
            event.index, event.token_ids, event.text, event.choice, event.logprobs, event.prompt_logprobs
        )
        chunk["e"] = "finished"
    elif event.choice:
        chunk["c"] = event.choice
    usage, error, timing = event.usage, event.error, event.timing
    chunk["reason"] = event.reason
    if event.stop is not None:
        chunk["stop"] = event.stop
    if usage is not None:
        chunk["usage"] = {"prompt": usage.prompt, "completion": usage.completion, "cached": usage.cached}
    if error is not None:
        chunk["error"] = {"code": error.code, "message": error.message}
        if error.param is not None:
            chunk["error"]["param"] = error.param
    if timing is not None:
        times = {name: getattr(timing, name) for name in Timing.__slots__}
        chunk["timing"] = {name: time_ms for name, time_ms in times.items() if time_ms is not None}
    if event.done:
        chunk["done"] = True
    return chunk


# --- from the wire ----------------------------------------------------------------------------------------------------


class _BadFieldError(ValueError):
    """A field of an entry that is missing or of the wrong type; `decode` makes a MalformedEntryError of it."""


def decode(entry_id: bytes | str, fields: Mapping[bytes, bytes], request_id: str = "") -> Event | None:
    """The event of an entry, None for a kind that this version does not know. Raises MalformedEntryError."""
    try:
        at = parse_id(entry_id)
        kind: Kind = "d"
        if (payload := fields.get(b"d")) is not None:
            if (tokens := decode_tokens(at, payload)) is not None:
                return tokens
        elif (payload := fields.get(b"json")) is not None:
            kind = "json"
        else:
            raise _BadFieldError("neither d nor json")
        found = unpack(payload, kind, max_bytes=_MAX_ENTRY_BYTES)
        decoder = _DECODERS.get(_take(found, "e", str))
        return None if decoder is None else decoder(at, found)
    except (_BadFieldError, InvalidJobError, ValueError) as error:
        shown = entry_id.decode("ascii", "replace") if isinstance(entry_id, bytes) else entry_id
        raise MalformedEntryError(request_id, shown, str(error)) from error


def _take(fields: Mapping[str, Any], name: str, kind: type, default: Any = ...) -> Any:
    value = fields.get(name, default)
    if value is ...:
        raise _BadFieldError(f"{name} is missing")
    if type(value) is not kind and value is not default:
        raise _BadFieldError(f"{name} is not of type {kind.__name__}")
    return value


def _ints(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    items = cast("list[object]", _take(fields, name, list, []))
    if items and set(map(type, items)) != {int}:
        raise _BadFieldError(f"{name} is not a list of integers")
    return tuple(cast("list[int]", items))


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is not None and type(value) is not float and type(value) is not int:
        raise _BadFieldError(f"{name} is not a number")
    return None if value is None else float(value)


def _logprobs(items: Any, name: str) -> TokenLogprobs:
    try:
        return tuple((int(token_id), float(logprob)) for token_id, logprob in items)
    except (TypeError, ValueError) as error:
        raise _BadFieldError(f"{name} does not hold pairs of an id and a number") from error


def _chunk(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What `tokens` and the last chunk of `finished` have in common, as arguments of their classes."""
    lp = _take(fields, "lp", list, None)
    plp = _take(fields, "plp", list, None)
    return {
        "token_ids": _ints(fields, "t"),
        "text": _take(fields, "x", str, ""),
        "choice": _take(fields, "c", int, 0),
        "logprobs": None if lp is None else tuple(_logprobs(item, "lp") for item in lp),
        "prompt_logprobs": None
        if plp is None
        else tuple(None if item is None else _logprobs(item, "plp") for item in plp),
    }


def _decode_queued(at: EntryId, fields: Mapping[str, Any]) -> Queued:
    return Queued(at, _take(fields, "fp", str))


def _decode_started(at: EntryId, fields: Mapping[str, Any]) -> Started:
    key, _, job_id = cast("str", _take(fields, "job", str)).rpartition(" ")
    model = _take(fields, "model", dict)
    return Started(
        id=at,
        attempt=_take(fields, "attempt", int),
        worker=_take(fields, "worker", str),
        job=JobRef(key, job_id),
        resumed=_ints(fields, "resumed"),
        seed=_take(fields, "seed", int),
        fp=_take(fields, "fp", str),
        model=ModelRef(_take(model, "name", str), _take(model, "fingerprint", str)),
        metadata=_take(fields, "metadata", dict, None),
    )


def _decode_tokens(at: EntryId, fields: Mapping[str, Any]) -> Tokens:
    return Tokens(at, _take(fields, "i", int), **_chunk(fields))


def _decode_released(at: EntryId, _fields: Mapping[str, Any]) -> Released:
    return Released(at)


def _decode_finished(at: EntryId, fields: Mapping[str, Any]) -> Finished:
    if (reason := _take(fields, "reason", str)) not in _REASONS:
        raise _BadFieldError("an unknown reason")
    stop: int | str | None = fields.get("stop")
    if stop is not None and type(stop) not in (int, str):
        raise _BadFieldError("stop is neither an id nor a string")
    usage, error = _take(fields, "usage", dict, None), _take(fields, "error", dict, None)
    timing = _take(fields, "timing", dict, None)
    return Finished(
        id=at,
        reason=cast("Reason", reason),
        stop=stop,
        done=_take(fields, "done", bool, False),
        usage=None if usage is None else Usage(*(_take(usage, name, int) for name in Usage.__slots__)),
        error=None
        if error is None
        else ErrorInfo(_take(error, "code", str), _take(error, "message", str), _take(error, "param", str, None)),
        timing=None if timing is None else Timing(*(_number(timing, name) for name in Timing.__slots__)),
        index=_take(fields, "i", int, None),
        **_chunk(fields),
    )


_DECODERS: Final[Mapping[str, Callable[[EntryId, Mapping[str, Any]], Event]]] = {
    "queued": _decode_queued,
    "started": _decode_started,
    "tokens": _decode_tokens,
    "released": _decode_released,
    "finished": _decode_finished,
}
