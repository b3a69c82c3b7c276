"""What the engine accepts: checks a request against the model and the pool, and makes its sequences."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .sequence import Sequence
from .stopping import finish_of, max_len_of, stop_ids_of
from .types import Request, RequestRefusedError


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is checked against. Lengths in tokens."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    num_blocks: int
    block_size: int


def check_request(request: Request, limits: Limits) -> None:
    """Raise RequestRefusedError if a request can never run here: ids, lengths, blocks. Callers check other values."""
    options = request.options
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestRefusedError("invalid_request", "the prompt has no tokens", "prompt")
    _check_ids(prompt, limits.vocab_size, "prompt_token_ids")
    _check_ids(options.stop_token_ids, limits.vocab_size, "stop_token_ids")
    _check_ids(options.logit_bias, limits.vocab_size, "logit_bias")
    for name, value in (("max_tokens", options.max_tokens), ("n", options.n)):
        if value < 1:
            raise RequestRefusedError("invalid_request", f"{name} is {value}, at least 1 is needed", name)
    if len(prompt) >= limits.max_model_len:
        raise RequestRefusedError(
            "prompt_too_long",
            f"the prompt has {len(prompt)} tokens, the model takes fewer than {limits.max_model_len}",
        )
    max_len = max_len_of(options, len(prompt), limits.max_model_len)
    if max_len > limits.num_blocks * limits.block_size:
        raise RequestRefusedError(
            "kv_capacity",
            f"prompt and output may reach {max_len} tokens, the KV cache holds {limits.num_blocks * limits.block_size}",
        )


def sequences_of(request: Request, limits: Limits, arrival: int) -> list[Sequence]:
    """Make a sequence per choice that is still to run; `arrival` is the first one's, the others' follow it.

    Raises ValueError if `settled` or `skip_choices` do not fit `n`, or if nothing is left to run.
    """
    options = request.options
    if request.settled and len(request.settled) != options.n:
        raise ValueError(f"{request.request_id}: settled has {len(request.settled)} entries, n is {options.n}")
    if not request.skip_choices <= set(range(options.n)):
        raise ValueError(f"{request.request_id}: skip_choices {sorted(request.skip_choices)} are not all below n")
    stop_ids = stop_ids_of(options, limits.eos_token_ids)
    num_prompt_tokens = len(request.prompt_token_ids)
    sequences: list[Sequence] = []
    for choice in range(options.n):
        settled = request.settled[choice] if request.settled else ()
        ended = finish_of(settled, options, stop_ids, limits.max_model_len, num_prompt_tokens) is not None
        if ended or choice in request.skip_choices:
            continue
        sequence = Sequence(
            request_id=request.request_id,
            choice=choice,
            options=options,
            salt=request.cache_salt,
            priority=request.priority,
            arrival=arrival + len(sequences),
            token_ids=[*request.prompt_token_ids, *settled],
            num_prompt_tokens=num_prompt_tokens,
            num_settled=len(settled),
            stop_ids=stop_ids,
            max_len=max_len_of(options, num_prompt_tokens, limits.max_model_len),
            min_stop_len=num_prompt_tokens + options.min_tokens,
            only_best=options.only_best,
        )
        # They go out with choice 0's first token: one that has settled tokens had them in an earlier attempt.
        if options.prompt_logprobs is not None and choice == 0 and not settled:
            sequence.prompt_logprobs = [None]
        sequences.append(sequence)
    if not sequences:
        raise ValueError(f"{request.request_id}: every choice has ended already")
    return sequences


def _check_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestRefusedError(
            "invalid_request", f"token id {wrong} is not in the vocabulary of {vocab_size}", param
        )
