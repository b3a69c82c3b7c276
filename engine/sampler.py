"""From scores to tokens: what a request asked of its output is applied here, row by row.

Order: penalties (repetition, then presence and frequency), logit_bias, stop tokens banned below min_tokens, then
temperature, top_k, top_p, min_p and the draw (`kernels.sample`). Log-probabilities are those of the model's own
distribution, before any of this. A row that asks for nothing costs nothing, and no row's result depends on the
others.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.backend import Backend
from ..kernels.lists import floats, ints
from ..kernels.sample import SampleParameters
from .sequence import Sequence
from .types import TokenLogprobs

LOGPROB_ROWS = (
    16  # rows whose log-probabilities are computed together: bounds the extra memory to 2 · 16 · vocab floats
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's token."""

    token_id: int
    logprobs: TokenLogprobs | None  # if the request asked


class Sampler:
    """Stateless: everything a row needs is read from its sequence."""

    def __init__(self, backend: Backend) -> None:
        self._draw = backend.sample

    def sample(self, logits: torch.Tensor, sequences: Rows[Sequence]) -> list[Sampled]:
        """Sample one token for each sequence from its row of `logits`.

        logits is float32 [len(sequences), vocab], finite, and may be changed here: pass what nobody else reads.
        """
        adjusted = [row for row, sequence in enumerate(sequences) if _asks_for_adjustment(sequence)]
        wants = [row for row, sequence in enumerate(sequences) if sequence.options.logprobs is not None]
        scores = logits.clone() if adjusted and wants else logits
        for row in adjusted:
            adjust(scores[row], sequences[row])
        tokens = ints(self._draw(scores, parameters(sequences)))
        logprobs: dict[int, TokenLogprobs] = {}
        for at in range(0, len(wants), LOGPROB_ROWS):
            rows = wants[at : at + LOGPROB_ROWS]
            counts = [sequences[row].options.logprobs or 0 for row in rows]
            found = token_logprobs(logits[rows], [tokens[row] for row in rows], counts)
            logprobs.update(zip(rows, found, strict=True))
        return [Sampled(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def parameters(sequences: Rows[Sequence]) -> SampleParameters:
    """Collect what the draw needs; a sequence's next token stands at position `num_tokens`."""
    options = [sequence.options for sequence in sequences]
    return SampleParameters(
        temperature=torch.tensor([o.temperature for o in options], dtype=torch.float32),
        top_k=torch.tensor([o.top_k for o in options], dtype=torch.int32),
        top_p=torch.tensor([o.top_p for o in options], dtype=torch.float32),
        min_p=torch.tensor([o.min_p for o in options], dtype=torch.float32),
        seed=torch.tensor([_signed(o.seed) for o in options], dtype=torch.int64),
        choice=torch.tensor([sequence.choice for sequence in sequences], dtype=torch.int64),
        position=torch.tensor([sequence.num_tokens for sequence in sequences], dtype=torch.int64),
    )


def _signed(seed: int) -> int:
    """The 64-bit number with the seed's low 64 bits."""
    low = seed & 0xFFFF_FFFF_FFFF_FFFF
    return low - (1 << 64) if low >> 63 else low


def wants_only_the_best(sequence: Sequence) -> bool:
    """Whether the next token is the one with the best score, and nothing else is asked of the scores."""
    return sequence.only_best and not _bans_stops(sequence)


def _asks_for_adjustment(sequence: Sequence) -> bool:
    return sequence.options.changes_scores or _bans_stops(sequence)


def _bans_stops(sequence: Sequence) -> bool:
    return sequence.num_tokens < sequence.min_stop_len and bool(sequence.stop_ids)


def adjust(scores: torch.Tensor, sequence: Sequence) -> None:
    """Change one row of scores, float32 [vocab], in place, as the sequence's options ask."""
    o = sequence.options
    if o.repetition_penalty != 1.0:
        seen = torch.as_tensor(np.unique(sequence.token_ids))
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / o.repetition_penalty, values * o.repetition_penalty)
    if o.presence_penalty != 0.0 or o.frequency_penalty != 0.0:
        output = np.array(sequence.token_ids[sequence.num_prompt_tokens :], dtype=np.int64)
        ids, counts = np.unique(output, return_counts=True)
        penalty = o.presence_penalty + o.frequency_penalty * counts
        scores[torch.as_tensor(ids)] -= torch.as_tensor(penalty.astype(np.float32))
    if o.logit_bias:
        ids = torch.tensor(list(o.logit_bias.keys()), dtype=torch.int64)
        scores[ids] += torch.tensor(list(o.logit_bias.values()), dtype=torch.float32)
    if _bans_stops(sequence):
        banned = [token_id for token_id in sequence.stop_ids if 0 <= token_id < len(scores)]
        scores[torch.tensor(banned, dtype=torch.int64)] = float("-inf")


def token_logprobs(logits: torch.Tensor, chosen: Rows[int], counts: Rows[int]) -> list[TokenLogprobs]:
    """For each row of `logits` [rows, vocab], the chosen token's natural log-probability, then the `counts` best ones'.

    The chosen token comes first and once more among the best if it is one of them; of equal ones the lower id comes
    first.
    """
    table = torch.log_softmax(logits, dim=-1)
    own = floats(table.gather(1, torch.tensor(chosen, dtype=torch.int64).unsqueeze(1)).squeeze(1))
    best: list[list[tuple[int, float]]] = [[] for _ in chosen]
    for count in sorted(set(counts) - {0}):  # a row's ties must not depend on how many another row asked for
        rows = [row for row, one in enumerate(counts) if one == count]
        top = table[rows].topk(min(count, table.shape[1]))
        for at, row in enumerate(rows):
            pairs = zip(ints(top.indices[at]), floats(top.values[at]), strict=True)
            best[row] = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    return [((token, value), *rest) for token, value, rest in zip(chosen, own, best, strict=True)]
