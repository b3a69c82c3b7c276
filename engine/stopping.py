"""When a choice ends by its token ids. Stop strings are found in text, by the caller.

A stop token (EOS unless ignored, or one of `stop_token_ids`) ends a choice only if at least `min_tokens` output tokens
stand before it; until then the sampler bans it. With `min_tokens` 2, tokens 0 and 1 cannot end a choice, token 2 can.
A token that is both a stop and the last one allowed ends with "stop".
"""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from typing import TYPE_CHECKING

from .types import Finish, SamplingOptions

if TYPE_CHECKING:
    from .sequence import Sequence

_LENGTH = Finish("length")


def stop_ids_of(options: SamplingOptions, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the ids that end a choice: every EOS id of the model unless ignored, and the request's own."""
    own = frozenset(options.stop_token_ids)
    return own if options.ignore_eos else own | eos_token_ids


def max_len_of(options: SamplingOptions, prompt_len: int, max_model_len: int) -> int:
    """Return how many tokens, prompt included, a choice may have."""
    return min(prompt_len + options.max_tokens, max_model_len)


def finish_after_last(sequence: Sequence) -> Finish | None:
    """Return how the newest token of a sequence ends it, None if it does not."""
    token_ids = sequence.token_ids
    num_tokens, token_id = len(token_ids), token_ids[-1]
    if token_id in sequence.stop_ids and num_tokens > sequence.min_stop_len:
        return Finish("stop", stop=token_id)
    return _LENGTH if num_tokens >= sequence.max_len else None


def finish_of(
    tokens: TokenIds[int],
    options: SamplingOptions,
    stop_ids: frozenset[int],
    max_model_len: int,
    prompt_len: int,
) -> Finish | None:
    """Return how the output `tokens` of a choice end it, None if it goes on: the rules above for settled tokens."""
    for index in range(min(options.min_tokens, len(tokens)), len(tokens)):
        if tokens[index] in stop_ids:
            return Finish("stop", stop=tokens[index])
    done = prompt_len + len(tokens) >= max_len_of(options, prompt_len, max_model_len)
    return _LENGTH if done else None
