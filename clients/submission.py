"""From what a caller asks for to the bytes of a job: checked as a worker will check them, the same for the same."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict, cast

from .errors import ConfigError
from .job import decode_job
from .keys import PRIORITIES, Priority, check_id
from .options import CHECKS
from .payload import MAX_PAYLOAD_BYTES, Kind, pack

Format = Literal["msgpack", "json"]
_EXACT: Final = 1 << 53  # whole numbers below this are the same as floats
_FLOATS: Final = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class Options(TypedDict, total=False):
    """What a request may ask for; None is the same as leaving it out. docs/protocol.md has the ranges and defaults."""

    prompt_token_ids: Sequence[int] | None
    messages: Sequence[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    seed: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    n: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    response_format: Mapping[str, Any] | None
    stream: bool | None
    timeout_ms: int | None
    cache_salt: str | None
    metadata: Mapping[str, Any] | None
    traceparent: str | None


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that is ready to be sent."""

    id: str
    kind: Kind
    payload: bytes
    fp: str  # SHA-256 of the payload, in hex
    priority: Priority

    @property
    def field(self) -> str:
        """The job entry's field that holds the payload."""
        return "json" if self.kind == "json" else "job"


def build(
    options: Mapping[str, Any],
    request_id: str | None = None,
    priority: Priority = "normal",
    fmt: Format = "msgpack",
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> Submission:
    """A job of `options`, with a new id if `request_id` is None.

    Equal options give equal bytes: fields go in the protocol's order and numbers in the type of their field; the
    caller's own maps (messages, tools, metadata) keep their order. Raises ConfigError or InvalidJobError.
    """
    if priority not in PRIORITIES:
        raise ConfigError(f"priority is one of {', '.join(PRIORITIES)}", "priority")
    if fmt not in ("msgpack", "json"):
        raise ConfigError("fmt is msgpack or json", "fmt")
    kind: Kind = "json" if fmt == "json" else "d"
    payload = pack(_ordered(options, kind), kind)
    decode_job(payload, kind, max_bytes=max_bytes)
    fp = hashlib.sha256(payload).hexdigest()
    return Submission(check_id(uuid.uuid4().hex if request_id is None else request_id), kind, payload, fp, priority)


def _ordered(options: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    ordered = {name: _plain(name, given.pop(name), kind) for name in CHECKS if name in given}
    return ordered | given  # what is unknown is left for decode_job to name


def _plain(name: str, value: Any, kind: Kind) -> Any:
    """One form for what means the same: whole numbers as floats where floats are meant, biases in order of their id."""
    if name in _FLOATS and type(value) is int and abs(value) < _EXACT:  # decode_job refuses what is far larger
        return float(value)
    if name == "logit_bias" and isinstance(value, Mapping):
        return _biases(cast("Mapping[Any, Any]", value), kind)
    return value


def _biases(biases: Mapping[Any, Any], kind: Kind) -> Mapping[Any, Any]:
    if not all(type(key) in (int, str) and type(bias) in (int, float) for key, bias in biases.items()):
        return biases  # decode_job says what is wrong
    try:
        by_id = {int(key): float(bias) for key, bias in biases.items()}
    except (ValueError, OverflowError):
        return biases
    if len(by_id) != len(biases):
        return biases
    return {str(token_id) if kind == "json" else token_id: by_id[token_id] for token_id in sorted(by_id)}
