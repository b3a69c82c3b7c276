"""Which scores of a step change, and by how much: what sequences ask for, as one `Adjustments` for all of them."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels.adjust import NO_BIAS, Adjustments
from .sequence import Sequence

_PROMPT, _OUTPUT = 1, 2  # where an id stands, in the two bits below it; 0 for one that has a bias or a ban
Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


class _Row(NamedTuple):
    """One sequence's entries, see `Adjustments`."""

    token: Ints
    factor: Floats | None = None
    subtract: Floats | None = None
    bias: Floats | None = None


def asks_for_adjustment(sequence: Sequence) -> bool:
    """Whether scores are changed before the next token is drawn."""
    return sequence.options.changes_scores or bans_stops(sequence)


def bans_stops(sequence: Sequence) -> bool:
    """Whether a next token that stops would come too early."""
    return sequence.num_tokens < sequence.min_stop_len and bool(sequence.stop_ids)


def adjustments(sequences: Rows[Sequence], rows: Rows[int], vocab: int) -> Adjustments:
    """Collect what the sequences of these rows ask for; entries count rows as `sequences` does."""
    made = [_row(sequences[row], vocab) for row in rows]
    lengths = [len(each.token) for each in made]
    return Adjustments(
        torch.as_tensor(np.repeat(np.array(rows, np.int64), lengths)),
        torch.as_tensor(np.concatenate([each.token for each in made], dtype=np.int64)),
        _joined([each.factor for each in made], lengths, 1.0),
        _joined([each.subtract for each in made], lengths, 0.0),
        _joined([each.bias for each in made], lengths, NO_BIAS),
    )


def _joined(parts: list[Floats | None], lengths: list[int], nothing: float) -> torch.Tensor | None:
    if all(part is None for part in parts):
        return None
    whole = [
        np.full(length, nothing, np.float32) if part is None else part
        for part, length in zip(parts, lengths, strict=True)
    ]
    return torch.as_tensor(np.concatenate(whole))


def _row(sequence: Sequence, vocab: int) -> _Row:
    o = sequence.options
    biases = o.logit_bias
    if bans_stops(sequence):
        biases = {**biases, **{token: -np.inf for token in sequence.stop_ids if 0 <= token < vocab}}
    values = np.array(list(biases.values()), np.float32)
    repeats, counts = o.repetition_penalty != 1.0, o.presence_penalty != 0.0 or o.frequency_penalty != 0.0
    if not (repeats or counts):
        return _Row(np.array(list(biases), np.int64), bias=values)
    keys = _keys(sequence, list(biases))
    if not len(keys):
        return _Row(keys)
    ids = keys >> 2
    last = np.append(np.flatnonzero(ids[1:] != ids[:-1]), len(ids) - 1)
    token, factor, subtract, bias = ids[last], None, None, None
    if repeats:
        factor = np.where(keys[last] & 3, np.float32(o.repetition_penalty), np.float32(1))
    if counts:
        times = np.cumsum(keys & _OUTPUT)[last] // _OUTPUT
        times[1:] -= times[:-1].copy()
        subtract = np.where(times, o.presence_penalty + o.frequency_penalty * times, 0.0).astype(np.float32)
    if biases:
        bias = np.full(len(token), NO_BIAS, np.float32)
        bias[np.searchsorted(token, list(biases))] = values
    return _Row(token, factor, subtract, bias)


def _keys(sequence: Sequence, others: list[int]) -> Ints:
    """Ids, each with where it stands, as often as it stands there, and the others; int32, ascending.

    The prompt counts for the repetition penalty alone.
    """
    prompt = sequence.num_prompt_tokens
    begin = 0 if sequence.options.repetition_penalty != 1.0 else prompt
    keys = np.array(sequence.token_ids[begin:], np.int32)
    keys <<= 2
    keys[: prompt - begin] |= _PROMPT
    keys[prompt - begin :] |= _OUTPUT
    if others:
        keys = np.concatenate((keys, np.array(others, np.int32) << 2))
    keys.sort()
    return keys
