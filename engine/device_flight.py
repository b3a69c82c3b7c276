"""A step in flight on a device, from the host's side: where its results will be, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.lists import bools, ints
from .device import Mark
from .sampler import Wishes, sampled, with_chosen
from .types import Plan, RowResult

_NO_TOKEN, _NOT_FINITE = RowResult(), RowResult(finite=False)


@dataclass(frozen=True, slots=True)
class PromptResults:
    """Log-probabilities of prompt tokens that a row of a plan asks for."""

    number: int  # of the row
    targets: list[int]  # the tokens
    counts: list[int]  # of best ones, for each
    found: torch.Tensor  # as `logprobs.logprobs` gives it


@dataclass(frozen=True, slots=True)
class Results:
    """On the host once `mark` is waited for. The rows that sample count in the order of the plan."""

    mark: Mark
    finite_rows: torch.Tensor  # bool [rows of the step]
    finite_scores: torch.Tensor  # bool [rows that sample]
    tokens: torch.Tensor  # int64 [rows that sample]
    asked: Wishes | None
    logprobs: torch.Tensor | None
    prompts: tuple[PromptResults, ...]


class DeviceFlight:
    """`types.Flight`: `begin_to_sample` puts what is left of the step into the line."""

    def __init__(self, plan: Plan, begin_to_sample: Callable[[DeviceFlight], Results]) -> None:
        self.plan = plan
        self.sampling = [number for number, row in enumerate(plan.rows) if row.samples]
        self._begin_to_sample = begin_to_sample
        self._results: Results | None = None

    def draw(self) -> None:
        """See `types.Flight`."""
        self._results = self._begin_to_sample(self)

    def finish(self) -> list[RowResult]:
        """See `types.Flight`."""
        given = self._results
        if given is None:
            raise RuntimeError("a step that has not begun to sample is asked for its results")
        given.mark.wait()
        results = [_NO_TOKEN] * len(self.plan.rows)
        if given.asked is not None:
            found = sampled(given.asked, ints(given.tokens), given.logprobs)
            for number, one in zip(self.sampling, found, strict=True):
                results[number] = RowResult(one.token_id, logprobs=one.logprobs)
        for prompt in given.prompts:
            of_prompt = tuple(with_chosen(prompt.targets, prompt.counts, prompt.found))
            results[prompt.number] = results[prompt.number]._replace(prompt_logprobs=of_prompt)
        for number in self._not_finite(given):
            results[number] = _NOT_FINITE
        return results

    def _not_finite(self, given: Results) -> list[int]:
        """Numbers of rows of the plan with a hidden state or a score that is not finite."""
        finite = bools(given.finite_scores)
        bad = [number for number, is_finite in zip(self.sampling, finite, strict=True) if not is_finite]
        if not bool(given.finite_rows.all()):
            counts = [row.num_tokens for row in self.plan.rows]
            whole = np.logical_and.reduceat(given.finite_rows.numpy(), np.cumsum([0, *counts[:-1]]))
            bad += np.flatnonzero(~whole).tolist()
        return bad
