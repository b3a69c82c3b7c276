"""Runs plans on a device that computes behind the host's back: the model side of an engine on a GPU.

    begin    copy what has changed ─ pass ─ scores          a step of single tokens is a graph's replay
    draw     what the sequences ask ─ tokens ─ copy back    they stay on the device for the next step's begin, too
    finish   wait for the copy

Nothing between `begin` and `finish` waits. A step with a sequence of more tokens than one is computed operation by
operation, with attention in two launches: one for the sequences with one token, one for the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from ..kernels.attention import SharedPrefix
from ..kernels.backend import Backend
from ..kernels.embedding import Asked
from ..kernels.kv_layout import poison
from ..kernels.linear import padded_rows
from ..kernels.logprobs import width_of
from .batch import BatchLimits
from .device import Device, Graph
from .device_batch import DeviceBatch, Shape
from .device_flight import DeviceFlight, PromptResults, Results
from .kv_cache_memory import make_cache
from .passes import Passes
from .runner import PROMPT_LOGPROB_ROWS, LogitsHook, RunnerLimits
from .sampler import Sampler, Wishes, wishes
from .shared_prefix import sharing_of
from .types import Plan, RowResult, ScheduledRow

MOST_TILES = 16  # of sequences that share blocks, in a graph: each costs a launch's programs, used or not


def graph_sizes(max_num_seqs: int, multiple: int) -> list[int]:
    """Numbers of rows for which there is a graph, ascending: every number up to max_num_seqs has one that holds it."""
    sizes = {size for size in (1, 2, 4) if size < max_num_seqs} | set(range(8, max_num_seqs, 8)) | {max_num_seqs}
    return sorted({padded_rows(size, multiple) for size in sizes})


class _State:
    """What steps leave on the device for those behind them; the tensors stay where they are."""

    def __init__(self, max_rows: int, max_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.drawn = torch.zeros(max_seqs, dtype=torch.int64, device=device)  # tokens of the newest step
        self.every_row = torch.arange(max_seqs, device=device)
        self.scored = torch.zeros(max_seqs, dtype=torch.int64, device=device)  # rows of hidden states
        self.scores = torch.zeros((max_seqs, vocab_size), device=device)
        self.finite_scores = torch.zeros(max_seqs, dtype=torch.bool, device=device)
        self.finite_rows = torch.zeros(max_rows, dtype=torch.bool, device=device)
        self.hidden = torch.zeros(0, device=device)  # of a step that is no graph's


class DeviceRunner:
    """A `types.Overlapper` for one model on a device. Used by one thread at a time.

    `on_logits` is as `TorchRunner` has it, but called when a step's scores are there, and with rows of sequences that
    have ended meanwhile. `graphs` False: every step is computed operation by operation. `depth`: see `Overlapper`.
    """

    def __init__(
        self,
        model: Passes,
        backend: Backend,
        limits: RunnerLimits,
        device: Device,
        kv_scales: torch.Tensor | None = None,
        *,
        graphs: bool = True,
        depth: int = 2,
    ) -> None:
        self.vocab_size, self.eos_token_ids = model.vocab_size, model.eos_token_ids
        self.max_model_len, self.block_size = limits.max_model_len, limits.block_size
        self.window = model.kv.window
        self.num_blocks, self.num_window_blocks = limits.num_blocks, limits.num_window_blocks
        self.backend, self.model, self.dtype = backend, model, model.dtype
        self.depth = depth
        self.on_logits: LogitsHook | None = None
        self._device = device
        blocks = limits.num_blocks, limits.num_window_blocks, limits.block_size
        self._cache = make_cache(model.kv, *blocks, limits.kv_dtype, kv_scales, device.device)
        self._multiple = model.row_multiple
        max_rows = padded_rows(limits.max_num_batched_tokens, self._multiple)
        max_seqs = padded_rows(limits.max_num_seqs, self._multiple)
        self._forward = model.begin(self._cache, max(max_rows, max_seqs), limits.max_model_len)
        self._sampler = Sampler(backend)
        max_blocks = -(-limits.max_model_len // limits.block_size)
        sharing = sharing_of(backend, max_blocks * limits.block_size, limits.block_size, model.queries_per_kv_head)
        sizes = (max(max_rows, max_seqs), max_seqs, max_blocks, limits.block_size, self._multiple)
        self._batch = DeviceBatch(BatchLimits(*sizes, model.kv.kinds, sharing), device, MOST_TILES)
        self._state = _State(max(max_rows, max_seqs), max_seqs, model.vocab_size, device.device)
        self._places: dict[int, int] = {}  # of a sequence's serial: where the newest step puts its token
        self._graphs: dict[Shape, Graph] = {}
        self._sizes = graph_sizes(limits.max_num_seqs, self._multiple) if graphs else []
        # The largest first: what it takes, the others find. The tensors say that no row is anybody's.
        for size in reversed(self._sizes):
            for num_tiles in {0, MOST_TILES if sharing else 0}:
                shape = Shape(size, size, 1, num_tiles)
                rows = self._state.every_row[:size]
                self._graphs[shape] = device.capture(partial(self._compute, shape, rows))

    def rehearse(self) -> None:
        """Compute the largest step for nobody: what it takes, no step takes more of."""
        rows, seqs = len(self._state.finite_rows), len(self._state.drawn)
        self._device.put(partial(self._compute, Shape(rows, seqs, rows), self._state.every_row))
        self._device.mark().wait()

    def run(self, plan: Plan) -> list[RowResult]:
        """Compute one step; see `types.Runner`. Raises as `begin` does."""
        flight = self.begin(plan)
        flight.draw()
        return flight.finish()

    def begin(self, plan: Plan) -> DeviceFlight:
        """See `types.Overlapper`.

        Raises ValueError where a sequence lacks a block for what is to be computed.
        """
        for windowed, layers in zip(self.model.kv.kinds, self._cache.groups, strict=True):
            copies = plan.window_copies if windowed else plan.copies
            if copies:
                self._device.put(partial(self.backend.copy_blocks, layers, copies))
        flight = DeviceFlight(plan, self._begin_to_sample)
        shape, shared = self._shape(plan)
        self._batch.put(plan, shape, self._places, shared)
        graph = self._graphs.get(shape)
        if graph is None:
            self._device.put(partial(self._compute, shape, self._scored(plan, flight.sampling)))
        else:
            graph.replay()
        self._places = {plan.rows[number].sequence.serial: place for place, number in enumerate(flight.sampling)}
        return flight

    def poison_blocks(self, block_ids: Iterable[int], *, windowed: bool = False) -> None:
        """Fill whole blocks of a kind of layers with NaN. For tests: where nobody owns them it must change nothing."""
        if windowed in self.model.kv.kinds:
            layers = self._cache.groups[self.model.kv.kinds.index(windowed)]
            self._device.put(partial(poison, layers, list(block_ids)))

    def _shape(self, plan: Plan) -> tuple[Shape, SharedPrefix | None]:
        """How a plan is computed: by the smallest graph that holds it, or as it is; and what its sequences share."""
        count, longest = len(plan.rows), max(row.num_tokens for row in plan.rows)
        shared = self._batch.shared_by(plan)
        if self._sizes and longest == 1 and all(row.samples for row in plan.rows):
            size = next(size for size in self._sizes if size >= count)
            return Shape(size, size, 1, 0 if shared is None else MOST_TILES), shared
        tiles = 0 if shared is None else len(shared.tile_len)
        return Shape(padded_rows(plan.num_tokens, self._multiple), count, longest, tiles), shared

    def _scored(self, plan: Plan, sampling: list[int]) -> torch.Tensor:
        """Rows of hidden states to be scored, padded: the last of each sequence that samples."""
        if not sampling:
            return self._state.scored[:0]
        last = np.cumsum([row.num_tokens for row in plan.rows])[sampling] - 1
        staged = self._device.pinned(padded_rows(len(last), self._multiple), dtype=torch.int64)
        staged.zero_()[: len(last)] = torch.as_tensor(last)
        rows = self._state.scored[: len(staged)]
        self._device.copy(rows, staged)
        return rows

    def _compute(self, shape: Shape, scored: torch.Tensor) -> None:
        """The pass over what is in the tensors, and the scores of some rows."""
        state, inputs, count = self._state, self._batch.inputs(shape), len(scored)
        with torch.inference_mode():
            drawn = state.drawn[inputs.source.clamp(min=0)]
            token_ids = torch.where(inputs.source >= 0, drawn, inputs.token_ids)
            asked = Asked(scored, self.model.output, 0, state.scores) if count else None
            computed = self._forward(replace(inputs, token_ids=token_ids), asked)()
            state.hidden = computed.hidden
            state.finite_rows[: shape.num_rows] = torch.isfinite(computed.hidden.sum(1, dtype=torch.float32))
            if computed.scores is not None:
                self.model.final(computed.scores.scores)  # in place, where they lie
                state.finite_scores[:count] = computed.scores.finite

    def _begin_to_sample(self, flight: DeviceFlight) -> Results:
        """Draw, and copy to the host what the step gives."""
        state, plan, count = self._state, flight.plan, len(flight.sampling)
        asked, logprobs = None, None
        if count:
            sequences = [plan.rows[number].sequence for number in flight.sampling]
            asked = wishes(sequences, self.vocab_size)
            if asked.rows:
                width = 1 + 2 * width_of(asked.counts, self.vocab_size)
                logprobs = torch.empty((len(asked.rows), width), dtype=torch.int32, device=self._device.device)
            if self.on_logits is not None:
                self._device.put(partial(self.on_logits, plan, state.scores[:count]))
            self._device.put(partial(self._sample, asked, count, logprobs))
        prompts = tuple(
            self._prompt(number, begin, row)
            for number, (begin, row) in enumerate(zip(_starts(plan), plan.rows, strict=True))
            if row.sequence.needs_prompt_logprobs
        )
        return Results(
            finite_rows=self._to_host(state.finite_rows[: plan.num_tokens]),
            finite_scores=self._to_host(state.finite_scores[:count]),
            tokens=self._to_host(state.drawn[:count]),
            asked=asked,
            logprobs=None if logprobs is None else self._to_host(logprobs),
            prompts=prompts,
            mark=self._device.mark(),
        )

    def _sample(self, asked: Wishes, count: int, logprobs: torch.Tensor | None) -> None:
        with torch.inference_mode():
            drawn, found = self._sampler.draw(self._state.scores[:count], asked)
            self._state.drawn[:count] = drawn
            if logprobs is not None and found is not None:
                logprobs.copy_(found)

    def _prompt(self, number: int, begin: int, row: ScheduledRow) -> PromptResults:
        """Log-probabilities of the prompt tokens that follow a row's positions; from row `begin` of the step on."""
        sequence, count = row.sequence, row.sequence.options.prompt_logprobs or 0
        end = min(row.start + row.num_tokens, sequence.num_prompt_tokens - 1)
        targets = sequence.token_ids[row.start + 1 : end + 1]
        width = 1 + 2 * width_of([count], self.vocab_size)
        found = torch.empty((len(targets), width), dtype=torch.int32, device=self._device.device)
        for at in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = targets[at : at + PROMPT_LOGPROB_ROWS]
            self._device.put(partial(self._prompt_slice, begin + at, part, count, found[at : at + len(part)]))
        return PromptResults(number, targets, [count] * len(targets), self._to_host(found))

    def _prompt_slice(self, first: int, targets: list[int], count: int, found: torch.Tensor) -> None:
        with torch.inference_mode():
            rows = torch.zeros(padded_rows(len(targets), self._multiple), dtype=torch.int64)
            rows[: len(targets)] = torch.arange(first, first + len(targets))
            asked = Asked(rows.to(found.device, non_blocking=True), self.model.output)
            scores = self.model.final(self.model.score(self._state.hidden, asked).scores[: len(targets)])
            chosen = torch.tensor(targets, dtype=torch.int64)
            counts = [count] * len(targets)
            found.copy_(self.backend.logprobs(scores, range(len(targets)), chosen, counts))

    def _to_host(self, values: torch.Tensor) -> torch.Tensor:
        staged = self._device.pinned(*values.shape, dtype=values.dtype)
        self._device.copy(staged, values)
        return staged


def _starts(plan: Plan) -> list[int]:
    """The first row of each sequence."""
    starts: list[int] = np.cumsum([0, *(row.num_tokens for row in plan.rows[:-1])]).tolist()
    return starts
