"""Runs plans on a model with torch: the engine's model side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels.backend import Backend
from ..kernels.embedding import Asked, Scores
from ..kernels.forward import Finish as ForwardFinish
from ..kernels.kv_layout import poison
from ..kernels.linear import padded_rows
from ..kernels.lists import bools, ints
from .batch import Batch, BatchBuilder, BatchLimits
from .kv_cache_memory import make_cache
from .passes import Passes
from .sampler import Sampler, wants_only_the_best
from .shared_prefix import sharing_of
from .types import Plan, RowResult, ScheduledRow, TokenLogprobs

PROMPT_LOGPROB_ROWS = 32  # prompt positions scored together: bounds the extra memory to 2 · 32 · vocab floats
_NO_TOKEN, _NOT_FINITE = RowResult(), RowResult(finite=False)
LogitsHook = Callable[[Plan, torch.Tensor], None]


class _Sampling(NamedTuple):
    """Numbers of the plan's rows that sample, in the order in which they are scored."""

    greedy: list[int]  # want their best token and nothing else
    others: list[int]


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes that are fixed for a runner's life."""

    num_blocks: int  # of the layers that see all
    num_window_blocks: int  # of the layers with a window
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_dtype: torch.dtype


class TorchRunner:
    """A `types.Runner` for one model. Used by one thread at a time.

    `on_logits`, if set, is called in each step with the plan and the scores of the rows that sample, in the plan's
    order: float32 [rows that sample, vocab], as the model gave them, valid until it returns. kv_scales are those of a
    float8 cache, see `kv_scales`.
    """

    def __init__(
        self, model: Passes, backend: Backend, limits: RunnerLimits, kv_scales: torch.Tensor | None = None
    ) -> None:
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.max_model_len = limits.max_model_len
        self.window = model.kv.window
        self.num_blocks = limits.num_blocks
        self.num_window_blocks = limits.num_window_blocks
        self.block_size = limits.block_size
        self.backend = backend
        self.dtype = model.dtype
        self.model = model
        self.on_logits: LogitsHook | None = None
        device = model.device
        self._kinds = model.kv.kinds
        blocks = limits.num_blocks, limits.num_window_blocks, limits.block_size
        self._cache = make_cache(model.kv, *blocks, limits.kv_dtype, kv_scales)
        self._multiple = model.row_multiple
        max_rows = padded_rows(limits.max_num_batched_tokens, self._multiple)
        self._forward = model.begin(self._cache, max_rows, limits.max_model_len)
        self._sampler = Sampler(backend)
        self._scores = torch.empty((0, model.vocab_size), device=device)  # grows to the most rows that asked for any
        max_blocks = -(-limits.max_model_len // limits.block_size)
        sizes = (limits.max_num_batched_tokens, limits.max_num_seqs, max_blocks, limits.block_size, self._multiple)
        sharing = sharing_of(backend, max_blocks * limits.block_size, limits.block_size, model.queries_per_kv_head)
        self._builder = BatchBuilder(BatchLimits(*sizes, self._kinds, sharing), device)

    def run(self, plan: Plan) -> list[RowResult]:
        """Compute one step; see `types.Runner`.

        Raises:
            ValueError: the plan is larger than the limits, or a sequence lacks a block for what is to be computed.
        """
        return self.launch(plan)()

    def launch(self, plan: Plan) -> Callable[[], list[RowResult]]:
        """Begin a step; see `types.Launcher`. Raises as `run` does."""
        if not plan.rows:
            return list
        if plan.copies or plan.window_copies:
            self._copy(plan)
        batch = self._builder.build(plan)
        sampling = self._sampling(plan)
        rows = batch.last_rows[sampling.greedy + sampling.others]
        asked = self._asked(rows, len(sampling.greedy)) if len(rows) else None
        return partial(self._land, plan, batch, sampling, self._forward(batch, asked))

    def _copy(self, plan: Plan) -> None:
        for windowed, layers in zip(self._kinds, self._cache.groups, strict=True):
            copies = plan.window_copies if windowed else plan.copies
            if copies:
                self.backend.copy_blocks(layers, copies)

    def _land(self, plan: Plan, batch: Batch, sampling: _Sampling, finish: ForwardFinish) -> list[RowResult]:
        with torch.inference_mode():
            computed = finish()
            results = [_NO_TOKEN] * len(plan.rows)
            if computed.scores is not None:
                self._sample(plan, sampling, computed.scores, results)
            for number, row in enumerate(plan.rows):
                if row.sequence.needs_prompt_logprobs:
                    begin = int(batch.query_start[number])
                    logprobs = self._prompt_logprobs(row, computed.hidden, begin)
                    results[number] = results[number]._replace(prompt_logprobs=logprobs)
            for number in () if bool(computed.finite) else _not_finite_rows(computed.hidden, batch):
                results[number] = _NOT_FINITE
            return results

    def poison_blocks(self, block_ids: Iterable[int], *, windowed: bool = False) -> None:
        """Fill whole blocks of a kind of layers with NaN. For tests: where nobody owns them it must change nothing."""
        if windowed in self._kinds:
            poison(self._cache.groups[self._kinds.index(windowed)], list(block_ids))

    def _sampling(self, plan: Plan) -> _Sampling:
        asking = [number for number, row in enumerate(plan.rows) if row.samples]
        if self.on_logits is not None:
            return _Sampling([], asking)
        greedy = [number for number in asking if wants_only_the_best(plan.rows[number].sequence)]
        if len(greedy) == len(asking):
            return _Sampling(greedy, [])
        return _Sampling(greedy, sorted(set(asking).difference(greedy)))

    def _asked(self, rows: np.ndarray[Any, np.dtype[np.int64]], num_best: int = 0) -> Asked:
        """Ask for the scores of rows of hidden states, of the first `num_best` for their best only; padded."""
        padded = rows
        if self._multiple > 1:
            padded = np.zeros(padded_rows(len(rows), self._multiple), np.int64)
            padded[: len(rows)] = rows
        device = self.model.device
        if len(padded) - num_best > len(self._scores):
            self._scores = torch.empty((len(padded) - num_best, self.vocab_size), device=device)
        return Asked(torch.as_tensor(padded, device=device), self.model.output, num_best, self._scores)

    def _sample(self, plan: Plan, sampling: _Sampling, scored: Scores, results: list[RowResult]) -> None:
        """Put in the tokens of the rows that ask for one, and mark those whose scores are not finite."""
        greedy, others = sampling
        scores = self.model.final(scored.scores[: len(others)])
        if self.on_logits is not None:
            self.on_logits(plan, scores)
        finite = bools(scored.finite)[: len(greedy) + len(others)]  # what is behind is padding
        for number, token_id in zip(greedy, ints(scored.best), strict=True):
            results[number] = RowResult(token_id)
        good = [at for at, is_finite in enumerate(finite[len(greedy) :]) if is_finite]
        if good:
            sequences = [plan.rows[others[at]].sequence for at in good]
            chosen = scores if len(good) == len(others) else scores[good]
            for at, sampled in zip(good, self._sampler.sample(chosen, sequences), strict=True):
                results[others[at]] = RowResult(sampled.token_id, logprobs=sampled.logprobs)
        if not all(finite):
            for number, is_finite in zip(greedy + others, finite, strict=True):
                if not is_finite:
                    results[number] = _NOT_FINITE

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
            scores = self.model.final(self.model.score(hidden, self._asked(rows)).scores[: len(rows)])
            found += self._sampler.token_logprobs(scores, targets, [count] * len(targets))
        return tuple(found)


def _not_finite_rows(hidden: torch.Tensor, batch: Batch) -> list[int]:
    """Sequences with a hidden state in this step that is not finite."""
    finite = torch.isfinite(hidden[: batch.num_tokens]).all(dim=1).cpu().numpy()
    starts = batch.query_start[:-1].cpu().numpy()
    bad: list[int] = np.flatnonzero(~np.logical_and.reduceat(finite, starts)).tolist()
    return bad
