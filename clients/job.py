"""A job as it lies in a jobs stream, and as a worker runs it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .errors import InvalidEntryError, shown_name
from .keys import is_valid_id
from .options import check_options
from .payload import MAX_PAYLOAD_BYTES, Kind, unpack

VERSION: Final = b"1"
_FP = re.compile(rb"[0-9a-f]{64}")
_FIELDS = frozenset({b"id", b"job", b"json", b"v", b"fp"})
_INT_KEYS = frozenset({"logit_bias"})


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One entry of a jobs stream, taken apart; the payload is not decoded yet."""

    id: str
    kind: Kind  # how the payload is encoded, and the answer will be
    payload: bytes
    fp: str | None  # SHA-256 of the payload in hex, where a client library wrote `queued` first


@dataclass(frozen=True, slots=True)
class Job:
    """A job's map with its defaults. Lists have become tuples; nothing in here is ever changed."""

    # exactly one of these three is not None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None  # each has role and content, both str
    tools: tuple[Mapping[str, Any], ...] | None = None  # these two only with messages
    chat_template_kwargs: Mapping[str, Any] | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None  # None: the worker draws one
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: Mapping[str, Any] | None = None
    stream: bool = True
    timeout_ms: int | None = None  # from the time in the job entry's id
    cache_salt: str = ""
    metadata: Mapping[str, Any] | None = None
    traceparent: str | None = None


def decode_entry(fields: Mapping[bytes, bytes]) -> JobEntry:
    """Take an entry of a jobs stream apart. Raises InvalidEntryError, which knows the id if that is valid."""
    raw_id = fields.get(b"id", b"").decode("utf-8", "replace")
    request_id = raw_id if is_valid_id(raw_id) else None
    kind: Kind = "json" if b"json" in fields and b"job" not in fields else "d"

    def refuse(param: str, message: str) -> InvalidEntryError:
        return InvalidEntryError(message, param, request_id, kind)

    if request_id is None:
        raise refuse("id", "not 1 to 128 characters of A-Z a-z 0-9 _ . : -" if raw_id else "missing")
    for name in fields:
        if name not in _FIELDS:
            raise refuse(shown_name(name.decode("utf-8", "backslashreplace")), "unknown entry field")
    if (b"job" in fields) == (b"json" in fields):
        raise refuse("job", "exactly one of job and json is needed")
    if fields.get(b"v", VERSION) != VERSION:
        raise refuse("v", "a version other than 1")
    fp = fields.get(b"fp")
    if fp is not None and not _FP.fullmatch(fp):
        raise refuse("fp", "not a SHA-256 in lower-case hex")
    payload = fields[b"json" if kind == "json" else b"job"]
    return JobEntry(request_id, kind, payload, None if fp is None else fp.decode("ascii"))


def decode_job(payload: bytes, kind: Kind, *, max_bytes: int = MAX_PAYLOAD_BYTES) -> Job:
    """Decode and check a job's payload.

    Raises InvalidJobError: with `payload_undecodable` (then it is a PayloadError) the job goes to `dead`; with
    `invalid_request` it ends in its stream, and `param` names the field.
    """
    return Job(**check_options(unpack(payload, kind, max_bytes=max_bytes, int_keys=_INT_KEYS)))
