"""Runs plans on a model with torch: the engine's model side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.backend import Backend
from ..kernels.block_copy import copy_blocks
from ..kernels.large_pages import zeros_in_large_pages
from ..kernels.linear import padded_rows, row_multiple
from ..kernels.lists import bools
from .batch import Batch, BatchBuilder
from .config import ModelConfig
from .models.decoder import Decoder
from .sampler import Sampled, Sampler, token_logprobs
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
        self.on_logits: LogitsHook | None = None
        device = weights.embedding.device
        shape = (config.num_layers, 2, limits.num_blocks, limits.block_size, config.num_kv_heads, config.head_dim)
        self._cache = zeros_in_large_pages(shape, limits.kv_dtype)
        self._multiple = row_multiple(weights.layers[0].qkv)
        self._decoder = Decoder(config, weights, backend, limits.max_model_len)
        self._sampler = Sampler(backend)
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
            hidden = self._decoder.forward(batch, self._cache)
            finite = _finite_rows(hidden, batch)
            sampled = self._sample(plan, hidden, batch, finite)
            return [
                RowResult(
                    token_id=sampled[number].token_id if number in sampled else None,
                    logprobs=sampled[number].logprobs if number in sampled else None,
                    prompt_logprobs=self._prompt_logprobs(row, hidden, int(batch.paging.query_start[number])),
                )
                if finite[number]
                else RowResult(finite=False)
                for number, row in enumerate(plan.rows)
            ]

    def fill_blocks(self, block_ids: Iterable[int], value: float) -> None:
        """Overwrite whole blocks in every layer. For tests: NaN in every block that nobody owns must change nothing."""
        self._cache[:, :, list(block_ids)] = value

    def _sample(self, plan: Plan, hidden: torch.Tensor, batch: Batch, finite: list[bool]) -> dict[int, Sampled]:
        """Sample for the rows that ask and are finite; a row whose scores are not is struck from `finite`."""
        asking = [number for number, row in enumerate(plan.rows) if row.samples]
        if not asking:
            return {}
        last = batch.paging.query_start[1:][asking].long() - 1
        logits = self._logits(hidden, last)
        if self.on_logits is not None:
            self.on_logits(plan, logits)
        good = torch.isfinite(logits.sum(dim=1))  # one pass; a sum of finite scores does not overflow
        for number, is_good in zip(asking, bools(good), strict=True):
            finite[number] &= is_good
        kept = [at for at, number in enumerate(asking) if finite[number]]
        if len(kept) < len(asking):
            asking, logits = [asking[at] for at in kept], logits[kept]
        sampled = self._sampler.sample(logits, [plan.rows[number].sequence for number in asking]) if asking else []
        return dict(zip(asking, sampled, strict=True))

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Scores of some rows of hidden states, by int64 index; padded for the product only."""
        padded = rows.new_zeros(padded_rows(len(rows), self._multiple))
        padded[: len(rows)] = rows
        return self._decoder.logits(hidden.index_select(0, padded))[: len(rows)]

    def _prompt_logprobs(self, row: ScheduledRow, hidden: torch.Tensor, begin: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt tokens that follow this row's positions, in slices."""
        sequence, count = row.sequence, row.sequence.options.prompt_logprobs
        if count is None or not sequence.needs_prompt_logprobs:
            return ()
        found: list[TokenLogprobs] = []
        end = min(row.start + row.num_tokens, sequence.num_prompt_tokens - 1)
        for start in range(row.start, end, PROMPT_LOGPROB_ROWS):
            stop = min(start + PROMPT_LOGPROB_ROWS, end)
            targets = sequence.token_ids[start + 1 : stop + 1]
            rows = torch.arange(begin + start - row.start, begin + stop - row.start, device=hidden.device)
            found += token_logprobs(self._logits(hidden, rows), targets, [count] * len(targets))
        return tuple(found)


def _finite_rows(hidden: torch.Tensor, batch: Batch) -> list[bool]:
    """For each sequence, whether the hidden states of all its positions in this step are finite."""
    finite = torch.isfinite(hidden[: batch.num_tokens]).all(dim=1).cpu().numpy()
    per_row: list[bool] = np.logical_and.reduceat(finite, batch.paging.query_start[:-1].cpu().numpy()).tolist()
    return per_row
