"""What a request of the chaos suite gives when nobody disturbs it: worked out naively, from nothing of the project.

Only the model itself (`chaos_model.wanted_token`) is shared with the workers. When a choice ends, what becomes text
and what a stop string cuts off is written down here a second time, the slow and obvious way.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from typing import Any

from tests.support.chaos_model import noise_of, wanted_token

EOS, VOCAB_SIZE, MAX_MODEL_LEN = 257, 260, 512
Alternatives = list[list[float]]  # [[id, logprob], …], the chosen one first


@dataclass(frozen=True)
class Expected:
    """One choice, whole."""

    token_ids: list[int]
    text: str
    reason: str
    stop: int | str | None
    logprobs: list[Alternatives] | None


def prompt_of(job: Mapping[str, Any]) -> list[int]:
    """Token ids of a job's prompt: one per byte."""
    return list(job["prompt_token_ids"]) if "prompt_token_ids" in job else list(job["prompt"].encode())


def expected(job: Mapping[str, Any], seed: int, choice: int = 0, max_model_len: int = MAX_MODEL_LEN) -> Expected:
    """What a choice gives. `seed`: the job's, or the one that was drawn for it."""
    prompt, ids = prompt_of(job), list[int]()
    noise = noise_of(job.get("temperature", 1.0), seed, choice)
    min_tokens, limit = job.get("min_tokens", 0), min(job.get("max_tokens", 256), max_model_len - len(prompt))
    stop_ids = {*job.get("stop_token_ids", ()), *(() if job.get("ignore_eos") else (EOS,))}
    reason, stop, cut = "", None, None
    while not reason:
        token = wanted_token(prompt, ids, noise)
        while len(ids) < min_tokens and token in stop_ids:
            token = (token + 1) % VOCAB_SIZE
        ids.append(token)
        cut = _stop_string(ids, job.get("stop", ()), min_tokens)
        if cut is not None:
            reason, stop = "stop", cut[1]
        elif token in stop_ids and len(ids) > min_tokens:
            reason, stop = "stop", token
        elif len(ids) >= limit:
            reason = "length"
    text = text_of(ids)
    if cut is not None:
        end, found = cut
        text = text[:end] if job.get("include_stop") else text[: end - len(found)]
    return Expected(ids, text, reason, stop, _logprobs(prompt, ids, job.get("logprobs")))


def text_of(ids: TokenIds[int]) -> str:
    """The whole text of some ids; bytes that are no UTF-8 become U+FFFD, special tokens nothing."""
    return bytes(each for each in ids if each < 256).decode("utf-8", "replace")


def _stop_string(ids: TokenIds[int], stops: TokenIds[str], min_tokens: int) -> tuple[int, str] | None:
    """Whether the newest token completes a stop string: (where it ends in the text, which)."""
    if not stops or len(ids) <= min_tokens:
        return None
    before, text = _final_text(ids[:-1]), _final_text(ids)
    for end in range(len(before) + 1, len(text) + 1):
        found = [each for each in stops if text[:end].endswith(each)]
        if found:
            return end, max(found, key=len)
    return None


def _final_text(ids: TokenIds[int]) -> str:
    """The text as far as no later byte can change it: without half a character at its end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(each for each in ids if each < 256))


def _logprobs(prompt: list[int], ids: list[int], top: int | None) -> list[Alternatives] | None:
    if top is None:
        return None
    known = prompt + ids
    return [_alternatives(known[:position], known[position], top) for position in range(len(prompt), len(known))]


def expected_prompt_logprobs(job: Mapping[str, Any]) -> list[Alternatives | None] | None:
    """What `plp` says, if it was asked for."""
    top, prompt = job.get("prompt_logprobs"), prompt_of(job)
    if top is None:
        return None
    return [None, *(_alternatives(prompt[:position], prompt[position], top) for position in range(1, len(prompt)))]


def _alternatives(context: list[int], chosen: int, top: int) -> Alternatives:
    """The scripted runner's values: they depend on the context alone, and fall with the rank."""
    first = (hash(tuple(context)) & (2**61 - 1)) % VOCAB_SIZE
    best = [[(first + rank) % VOCAB_SIZE, -0.25 * (rank + 1)] for rank in range(top)]
    value = next((logprob for token, logprob in best if token == chosen), -9.0)
    return [[chosen, value], *best]
