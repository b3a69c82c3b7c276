"""What a request's stream says, entry by entry. All frozen; `id` is the entry's id as (attempt, counter)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

EntryId = tuple[int, int]  # (A, K); compares as the server orders
Reason = Literal["stop", "length", "cancelled", "deadline", "error"]
# One token's alternatives: (token id, natural log of its probability), the chosen token first, then the k best.
TokenLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Which model answers: `fingerprint` is a hash over config, tokenizer, weights index and dtype, in hex."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class JobRef:
    """Which entry of which jobs stream an attempt runs."""

    key: str
    entry_id: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, over all choices: of the prompt, of the output, and of the prompt from the prefix cache."""

    prompt: int
    completion: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Why a request failed: the protocol's code, words, and the job's field at fault, if it is one."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """How long each part took, in ms; None where the request did not come to it."""

    queued_ms: float | None = None
    prefill_ms: float | None = None
    first_token_ms: float | None = None
    decode_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Queued:
    """A client library has written the request down; `fp` is the SHA-256 of the job's payload in hex."""

    id: EntryId
    fp: str


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt begins."""

    id: EntryId
    attempt: int  # 1, 2, …
    worker: str
    job: JobRef
    resumed: tuple[int, ...]  # tokens that earlier attempts have settled, per choice
    seed: int
    fp: str
    model: ModelRef
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Further output of one choice."""

    id: EntryId
    index: int  # of token_ids[0] in the choice's output
    token_ids: tuple[int, ...]  # every sampled id, end of sequence and stop tokens included
    text: str = ""  # whole characters, final; special tokens are skipped
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once; the first element is None


@dataclass(frozen=True, slots=True)
class Released:
    """The worker handed the request back; a later attempt follows."""

    id: EntryId


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice has ended, perhaps with a last chunk; with `done`, the whole request has, and all its choices."""

    id: EntryId
    reason: Reason
    stop: int | str | None = None  # the end-of-sequence or stop token; the stop string
    done: bool = False
    usage: Usage | None = None  # with `done`
    error: ErrorInfo | None = None  # with reason "error"
    timing: Timing | None = None
    index: int | None = None  # from here on as in Tokens; None where there is no last chunk
    token_ids: tuple[int, ...] = ()
    text: str = ""
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


Event = Queued | Started | Tokens | Released | Finished
