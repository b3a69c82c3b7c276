"""Runs plans on a model with torch: the engine's model side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..kernels.backend import Backend
from ..kernels.block_copy import copy_blocks
from ..kernels.embedding import Scores
from ..kernels.forward import immediately
from ..kernels.kv_layout import cached_width, poison
from ..kernels.large_pages import zeros_in_large_pages
from ..kernels.linear import padded_rows
from ..kernels.lists import bools, ints
from .batch import Batch, BatchBuilder
from .config import ModelConfig
from .models.decoder import Decoder, rotary_table
from .sampler import Sampler, token_logprobs, wants_only_the_best
from .types import Plan, RowResult, ScheduledRow, TokenLogprobs
from .weights import DecoderWeights

PROMPT_LOGPROB_ROWS = 32  # prompt positions scored together: bounds the extra memory to 2 · 32 · vocab floats
LogitsHook = Callable[[Plan, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes that are fixed for a runner's life."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_dtype: torch.dtype


class TorchRunner:
    """A `types.Runner` for one decoder. Used by one thread at a time.

    `on_logits`, if set, is called in each step with the plan and the scores of the rows that sample, in the plan's
    order: float32 [rows that sample, vocab], as the model gave them, valid until it returns.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, backend: Backend, limits: RunnerLimits) -> None:
        self.vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        self.max_model_len = limits.max_model_len
        self.num_blocks = limits.num_blocks
        self.block_size = limits.block_size
        self.backend = backend
        self.dtype = weights.embedding.dtype
        self.weights = weights
        self.on_logits: LogitsHook | None = None
        device = weights.embedding.values.device
        width = cached_width(config.head_dim, limits.kv_dtype)
        shape = (config.num_layers, 2, limits.num_blocks, limits.block_size, config.num_kv_heads, width)
        self._cache = zeros_in_large_pages(shape, limits.kv_dtype)
        self._multiple = backend.row_multiple(weights.layers[0].qkv)
        cos_sin = rotary_table(config.rope, config.head_dim, limits.max_model_len).to(device)
        describe = Decoder(config, weights).describe
        max_rows = padded_rows(limits.max_num_batched_tokens, self._multiple)
        self._forward = (
            backend.record(describe, self._cache, cos_sin, max_rows, self.dtype)
            if backend.record is not None
            else immediately(backend, describe, self._cache, cos_sin)
        )
        self._sampler = Sampler(backend)
        self._scores = torch.empty((0, config.vocab_size), device=device)  # grows to the most rows that asked for any
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self._builder = BatchBuilder(
            limits.max_num_batched_tokens, limits.max_num_seqs, max_blocks, limits.block_size, self._multiple, device
        )

    def run(self, plan: Plan) -> list[RowResult]:
        """Compute one step; see `types.Runner`.

        Raises:
            ValueError: the plan is larger than the limits, or a sequence lacks a block for what is to be computed.
        """
        if not plan.rows:
            return []
        with torch.inference_mode():
            if plan.copies:
                copy_blocks(self._cache, plan.copies)
            batch = self._builder.build(plan)
            hidden = self._forward(batch)
            results = self._sample(plan, hidden, batch)
            for number, row in enumerate(plan.rows):
                if row.sequence.needs_prompt_logprobs:
                    begin = int(batch.paging.query_start[number])
                    results[number] = results[number]._replace(
                        prompt_logprobs=self._prompt_logprobs(row, hidden, begin)
                    )
            for number in _not_finite_rows(hidden, batch):
                results[number] = RowResult(finite=False)
            return results

    def poison_blocks(self, block_ids: Iterable[int]) -> None:
        """Fill whole blocks of every layer with NaN. For tests: in blocks that nobody owns it must change nothing."""
        poison(self._cache, list(block_ids))

    def _sample(self, plan: Plan, hidden: torch.Tensor, batch: Batch) -> list[RowResult]:
        """Sample for the rows that ask; those that only want their best token come first in the product."""
        asking = [number for number, row in enumerate(plan.rows) if row.samples]
        results = [RowResult()] * len(plan.rows)
        if not asking:
            return results
        greedy = [n for n in asking if wants_only_the_best(plan.rows[n].sequence)] if self.on_logits is None else []
        others = sorted(set(asking).difference(greedy))
        scored = self._score(hidden, batch.last_rows[greedy + others], len(greedy))
        if self.on_logits is not None:
            self.on_logits(plan, scored.scores)
        finite = bools(scored.finite)
        for number, token_id in zip(greedy, ints(scored.best), strict=True):
            results[number] = RowResult(token_id)
        good = [at for at, is_finite in enumerate(finite[len(greedy) :]) if is_finite]
        if good:
            scores = scored.scores if len(good) == len(others) else scored.scores[good]
            sequences = [plan.rows[others[at]].sequence for at in good]
            for at, sampled in zip(good, self._sampler.sample(scores, sequences), strict=True):
                results[others[at]] = RowResult(sampled.token_id, logprobs=sampled.logprobs)
        for number, is_finite in zip(greedy + others, finite, strict=True):
            if not is_finite:
                results[number] = RowResult(finite=False)
        return results

    def _score(self, hidden: torch.Tensor, rows: np.ndarray[Any, np.dtype[np.int64]], num_best: int = 0) -> Scores:
        """Score rows of hidden states, the first `num_best` for their best only; padded for the product."""
        padded = np.zeros(padded_rows(len(rows), self._multiple), np.int64)
        padded[: len(rows)] = rows
        if len(padded) - num_best > len(self._scores):
            self._scores = torch.empty((len(padded) - num_best, self.vocab_size), device=hidden.device)
        at = torch.as_tensor(padded, device=hidden.device)
        found = self.backend.score(hidden, at, self.weights.output, num_best, self._scores)
        return Scores(found.best, found.scores[: len(rows) - num_best], found.finite[: len(rows)])

    def _prompt_logprobs(self, row: ScheduledRow, hidden: torch.Tensor, begin: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt tokens that follow this row's positions, in slices."""
        sequence, count = row.sequence, row.sequence.options.prompt_logprobs
        if count is None:
            return ()
        found: list[TokenLogprobs] = []
        end = min(row.start + row.num_tokens, sequence.num_prompt_tokens - 1)
        for start in range(row.start, end, PROMPT_LOGPROB_ROWS):
            stop = min(start + PROMPT_LOGPROB_ROWS, end)
            targets = sequence.token_ids[start + 1 : stop + 1]
            rows = np.arange(begin + start - row.start, begin + stop - row.start)
            found += token_logprobs(self._score(hidden, rows).scores, targets, [count] * len(targets))
        return tuple(found)


def _not_finite_rows(hidden: torch.Tensor, batch: Batch) -> list[int]:
    """Sequences with a hidden state in this step that is not finite."""
    live = hidden[: batch.num_tokens]
    if bool(torch.isfinite(live.sum(dtype=torch.float32))):
        return []  # a sum that is finite has only finite terms
    finite = torch.isfinite(live).all(dim=1).cpu().numpy()
    starts = batch.paging.query_start[:-1].cpu().numpy()
    bad: list[int] = np.flatnonzero(~np.logical_and.reduceat(finite, starts)).tolist()
    return bad
