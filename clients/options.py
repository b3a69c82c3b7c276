"""The fields of a job's map: for each its type and range, in the order of the protocol's table.

Types are strict: a bool is no integer, a whole number does for a float but not the other way round, null is no value
(leave the field out). Every refusal is InvalidJobError with `invalid_request` and the field's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from .errors import InvalidJobError, shown_name
from .payload import json_num_bytes

Check = Callable[[str, object], Any]

INT64_MAX: Final = (1 << 63) - 1
MAX_TOKEN_ID: Final = (1 << 31) - 1  # the worker checks ids against the model's vocabulary
MIN_TEMPERATURE: Final = 1e-6  # above 0, which is greedy: below this a division would overflow in float32
MAX_STOPS: Final = 64
MAX_STOP_LEN: Final = 1024  # characters
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_LOGIT_BIAS: Final = 1e6
MAX_METADATA_BYTES: Final = 16 << 10  # as compact JSON
PROMPTS: Final = ("prompt", "prompt_token_ids", "messages")

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,9}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")


def refuse(param: str, message: str) -> InvalidJobError:
    """The error for a field at fault."""
    return InvalidJobError("invalid_request", message, param)


def check_options(values: Mapping[str, object]) -> dict[str, Any]:
    """The fields of a decoded map, checked alone and together, lists as tuples. Raises InvalidJobError."""
    checked: dict[str, Any] = {}
    for name, value in values.items():
        check = CHECKS.get(name)
        if check is None:
            raise refuse(shown_name(name), "unknown field")
        checked[name] = check(name, value)
    given = [name for name in PROMPTS if name in checked]
    if len(given) != 1:
        raise refuse(given[1] if given else "prompt", f"exactly one of {', '.join(PROMPTS)} is needed")
    for name in ("tools", "chat_template_kwargs"):
        if name in checked and given[0] != "messages":
            raise refuse(name, "only allowed with messages")
    if checked.get("min_tokens", 0) > checked.get("max_tokens", 256):
        raise refuse("min_tokens", "greater than max_tokens")
    return checked


def _int(low: int, high: int) -> Check:
    def check(name: str, value: object) -> int:
        if type(value) is not int:
            raise refuse(name, "not an integer")
        if not low <= value <= high:
            raise refuse(name, f"not from {low} to {high}")
        return value

    return check


def _float(low: float, high: float, *, above: bool = False) -> Check:
    """A float from `low` (from above it, if `above`) to `high`."""

    def check(name: str, value: object) -> float:
        if type(value) is not float and type(value) is not int:
            raise refuse(name, "not a number")
        if not (low <= value <= high) or (above and value == low):
            raise refuse(name, f"not {'above' if above else 'from'} {low:g} to {high:g}")
        return float(value)

    return check


def _temperature(name: str, value: object) -> float:
    temperature: float = _float(0.0, 100.0)(name, value)
    if 0 < temperature < MIN_TEMPERATURE:
        raise refuse(name, f"neither 0 nor at least {MIN_TEMPERATURE:g}")
    return temperature


def _bool(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise refuse(name, "not a boolean")
    return value


def _str(name: str, value: object) -> str:
    if type(value) is not str:
        raise refuse(name, "not a string")
    return value


def _map(name: str, value: object) -> dict[str, Any]:
    if type(value) is not dict:
        raise refuse(name, "not a map")
    return cast("dict[str, Any]", value)


def _list(name: str, value: object) -> list[object]:
    if type(value) is not list:
        raise refuse(name, "not a list")
    return cast("list[object]", value)


def _maps(name: str, value: object) -> tuple[dict[str, Any], ...]:
    return tuple(_map(name, item) for item in _list(name, value))


def _token_ids(low_len: int, high_len: int | None) -> Check:
    def check(name: str, value: object) -> tuple[int, ...]:
        items = _list(name, value)
        if len(items) < low_len or (high_len is not None and len(items) > high_len):
            raise refuse(name, f"not {low_len} to {high_len} ids" if high_len else "empty")
        if items and set(map(type, items)) != {int}:
            raise refuse(name, "not a list of integers")
        ids = cast("list[int]", items)
        if ids and (min(ids) < 0 or max(ids) > MAX_TOKEN_ID):
            raise refuse(name, f"a token id not from 0 to {MAX_TOKEN_ID}")
        return tuple(ids)

    return check


def _messages(name: str, value: object) -> tuple[dict[str, Any], ...]:
    messages = _maps(name, value)
    if not messages:
        raise refuse(name, "empty")
    for message in messages:
        if type(message.get("role")) is not str or type(message.get("content")) is not str:
            raise refuse(name, "a message without role and content as strings")
    return messages


def _stops(name: str, value: object) -> tuple[str, ...]:
    stops = _list(name, value)
    if len(stops) > MAX_STOPS:
        raise refuse(name, f"more than {MAX_STOPS} strings")
    for stop in stops:
        if type(stop) is not str:
            raise refuse(name, "not a list of strings")
        if not 0 < len(stop) <= MAX_STOP_LEN:
            raise refuse(name, f"a string not of 1 to {MAX_STOP_LEN} characters")
    return tuple(cast("list[str]", stops))


def _logit_bias(name: str, value: object) -> dict[int, float]:
    """Integer keys can come from msgpack only; decimal strings from both, so that every encoder can send them."""
    biases: dict[int, float] = {}
    for key, bias in cast("dict[object, object]", _map(name, value)).items():
        if type(key) is str and _DECIMAL.fullmatch(key):
            key = int(key)  # noqa: PLW2901  (from here on both kinds are one)
        if type(key) is not int or not 0 <= key <= MAX_TOKEN_ID:
            raise refuse(name, f"a token id not from 0 to {MAX_TOKEN_ID}")
        if key in biases:
            raise refuse(name, "a duplicate token id")
        biases[key] = _float(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)(name, bias)
    return biases


def _metadata(name: str, value: object) -> dict[str, Any]:
    metadata = _map(name, value)
    if json_num_bytes(metadata) > MAX_METADATA_BYTES:
        raise refuse(name, f"more than {MAX_METADATA_BYTES} bytes as JSON")
    return metadata


def _traceparent(name: str, value: object) -> str:
    """W3C Trace Context, level 1: https://www.w3.org/TR/trace-context/#traceparent-header-field-values."""
    text = _str(name, value)
    match = _TRACEPARENT.fullmatch(text)
    if match is None or match[1] == "ff" or not match[2].strip("0") or not match[3].strip("0"):
        raise refuse(name, "no W3C traceparent")
    if match[1] == "00" and match[5] is not None:
        raise refuse(name, "no W3C traceparent of version 00")
    return text


CHECKS: Final[Mapping[str, Check]] = {
    "prompt": _str,
    "prompt_token_ids": _token_ids(1, None),
    "messages": _messages,
    "tools": _maps,
    "chat_template_kwargs": _map,
    "max_tokens": _int(1, INT64_MAX),
    "min_tokens": _int(0, INT64_MAX),
    "temperature": _temperature,
    "top_p": _float(0.0, 1.0, above=True),
    "top_k": _int(0, MAX_TOKEN_ID),
    "min_p": _float(0.0, 1.0),
    "repetition_penalty": _float(0.01, 100.0),
    "presence_penalty": _float(-2.0, 2.0),
    "frequency_penalty": _float(-2.0, 2.0),
    "logit_bias": _logit_bias,
    "seed": _int(0, INT64_MAX),
    "stop": _stops,
    "stop_token_ids": _token_ids(0, MAX_STOP_TOKEN_IDS),
    "ignore_eos": _bool,
    "include_stop": _bool,
    "n": _int(1, 16),
    "logprobs": _int(0, 20),
    "prompt_logprobs": _int(0, 20),
    "response_format": _map,
    "stream": _bool,
    "timeout_ms": _int(1, INT64_MAX),
    "cache_salt": _str,
    "metadata": _metadata,
    "traceparent": _traceparent,
}
