"""Checks of the sampler's kernels that take the modules they check, so that they can be shown faulty ones."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from headrace.kernels.gpu import cut as cut_module
from headrace.kernels.gpu import sample as sample_module
from headrace.kernels.gpu.packing import pack
from headrace.kernels.sample import SampleParameters, gumbel, kept_ids
from headrace.kernels.sample import sample as reference

RACE_BOUND = 2.0**-13  # of two race values that rounding may exchange; derived in kernels/gpu/sample.py
MASS_BOUND = 2.0**-17  # of the cumulative probability of a token that top_p may take or leave; kernels/gpu/cut.py
TYPES = {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32, "top_k": torch.int32}


def parameters(rows: int, **values: Any) -> SampleParameters:
    """The same value for every row, or a list that is repeated; by default temperature 1, position 0, 1, 2, …."""
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "choice": 0, "position": range(rows)}
    columns = {}
    for name, value in (full | values).items():
        items = list(value) if isinstance(value, list | range) else [value]
        column = [items[row % len(items)] for row in range(rows)]
        columns[name] = torch.tensor(column, dtype=TYPES.get(name, torch.int64))
    return SampleParameters(**columns)


def pick(p: SampleParameters, rows: list[int]) -> SampleParameters:
    return SampleParameters(*(getattr(p, name)[rows] for name in SampleParameters.__slots__))


def normal(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3


def kept(row: torch.Tensor, p: SampleParameters, at: int, shift: float = 0.0) -> set[int]:
    """What the reference's cuts leave, with top_p moved by `shift`."""
    scaled = (row - row.max()) / float(p.temperature[at])
    top_p = float(p.top_p[at])
    if top_p < 1.0:
        top_p = min(max(top_p + shift, 0.0), 1.0)
    return set(kept_ids(scaled, int(p.top_k[at]), top_p, float(p.min_p[at])).tolist())


def check_tokens(scores: torch.Tensor, p: SampleParameters, module: ModuleType = sample_module) -> None:
    """Tokens are the reference's, or lose to it by less than rounding may do."""
    got, want = module.sample(scores, p).tolist(), reference(scores, p).tolist()
    for row, (mine, best) in enumerate(zip(got, want, strict=True)):
        if mine == best:
            continue
        assert float(p.temperature[row]) > 0
        assert mine in kept(scores[row], p, row)
        pair = torch.tensor([mine, best])
        noise = gumbel(int(p.seed[row]), int(p.choice[row]), int(p.position[row]), pair)
        scaled = (scores[row] - scores[row].max()) / p.temperature[row]
        values = scaled[pair].double() + noise
        assert values[1] - values[0] < RACE_BOUND, f"row {row}: {mine} instead of {best}"


def found_sets(scores: torch.Tensor, p: SampleParameters, module: ModuleType = cut_module) -> list[set[int]]:
    """The ids that each row's limit leaves."""
    sets = []
    for row, (top, limit, last) in enumerate(module.cut(scores, scores.stride(0), pack(p).words).tolist()):
        distance = (torch.tensor(top, dtype=torch.int32).view(torch.float32) - scores[row]) / p.temperature[row]
        bits = distance.view(torch.int32)
        ids = torch.arange(scores.shape[1])
        sets.append(set(ids[(bits < limit) | ((bits == limit) & (ids <= last))].tolist()))
    return sets


def check_cuts(scores: torch.Tensor, p: SampleParameters, module: ModuleType = cut_module) -> None:
    """The cuts are the reference's, but for tokens whose cumulative probability is next to top_p."""
    for row, got in enumerate(found_sets(scores, p, module)):
        if float(p.top_p[row]) == 1.0:
            assert got == kept(scores[row], p, row), f"row {row}"
        else:
            assert kept(scores[row], p, row, -MASS_BOUND) <= got <= kept(scores[row], p, row, MASS_BOUND), f"row {row}"
