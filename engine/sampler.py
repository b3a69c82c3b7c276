"""From scores to tokens: what a request asked of its output is applied here, row by row.

Order: penalties (repetition, then presence and frequency), logit_bias, stop tokens banned below min_tokens, then
temperature, top_k, top_p, min_p and the draw (`kernels.sample`). Log-probabilities are those of the model's own
distribution, before any of this. A row that asks for nothing costs nothing, and no row's result depends on the
others.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from ..kernels.adjust import Adjustments
from ..kernels.backend import Backend
from ..kernels.lists import ints
from ..kernels.logprobs import pairs
from ..kernels.sample import SampleParameters
from .adjustments import adjustments, asks_for_adjustment, bans_stops
from .sequence import Sequence
from .types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's token."""

    token_id: int
    logprobs: TokenLogprobs | None  # if the request asked


@dataclass(frozen=True, slots=True)
class Wishes:
    """What sequences ask of their next tokens, on the host."""

    parameters: SampleParameters
    adjustments: Adjustments | None
    rows: list[int]  # that want log-probabilities
    counts: list[int]  # how many, each


class Sampler:
    """Stateless: everything a row needs is read from its sequence."""

    def __init__(self, backend: Backend) -> None:
        self._draw, self._adjust, self._logprobs = backend.sample, backend.adjust, backend.logprobs

    def sample(self, logits: torch.Tensor, sequences: Rows[Sequence]) -> list[Sampled]:
        """Sample one token for each sequence from its row of `logits`.

        logits is float32 [len(sequences), vocab], finite, and may be changed here: pass what nobody else reads.
        """
        asked = wishes(sequences, logits.shape[1])
        drawn, found = self.draw(logits, asked)
        return sampled(asked, ints(drawn), found)

    def draw(self, logits: torch.Tensor, asked: Wishes) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw a token for each row: int64 [rows]; and what was asked of log-probabilities, as `logprobs` gives it.

        Waits for nothing on a device. `logits` as for `sample`.
        """
        scores = logits.clone() if asked.adjustments is not None and asked.rows else logits
        if asked.adjustments is not None:
            self._adjust(scores, asked.adjustments)
        drawn = self._draw(scores, asked.parameters)
        return drawn, self._logprobs(logits, asked.rows, drawn, asked.counts) if asked.rows else None

    def token_logprobs(self, logits: torch.Tensor, chosen: Rows[int], counts: Rows[int]) -> list[TokenLogprobs]:
        """For each row of `logits` [rows, vocab], the chosen token's natural log-probability, then the best ones'.

        The chosen token comes first and once more among the best, of which there are `counts`, if it is one of them; of
        equal ones the lower id comes first.
        """
        found = self._logprobs(logits, range(len(logits)), torch.tensor(chosen, dtype=torch.int64), counts)
        return with_chosen(chosen, counts, found)


def wishes(sequences: Rows[Sequence], vocab: int) -> Wishes:
    """Collect what sequences ask, each of the row of its number; all their tokens are known."""
    adjusted = [row for row, sequence in enumerate(sequences) if asks_for_adjustment(sequence)]
    rows = [row for row, sequence in enumerate(sequences) if sequence.options.logprobs is not None]
    return Wishes(
        parameters(sequences),
        adjustments(sequences, adjusted, vocab) if adjusted else None,
        rows,
        [sequences[row].options.logprobs or 0 for row in rows],
    )


def sampled(asked: Wishes, tokens: list[int], found: torch.Tensor | None) -> list[Sampled]:
    """Put results together that `Sampler.draw` gave, on the host."""
    if found is None:
        return [Sampled(token, None) for token in tokens]
    each = with_chosen([tokens[row] for row in asked.rows], asked.counts, found)
    logprobs = dict(zip(asked.rows, each, strict=True))
    return [Sampled(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def with_chosen(chosen: Rows[int], counts: Rows[int], found: torch.Tensor) -> list[TokenLogprobs]:
    """Give what `logprobs` found for some rows as lists, each with its chosen token first."""
    return [((token, own), *best) for token, (own, best) in zip(chosen, pairs(found, counts), strict=True)]


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
    return sequence.only_best and not bans_stops(sequence)
