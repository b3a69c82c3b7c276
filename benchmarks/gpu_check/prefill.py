"""Prefill attention on the device: right at real shapes, and the same bits whoever is beside."""

from __future__ import annotations

from functools import partial

import torch

from headrace.kernels.gpu.ops import device_capability
from headrace.kernels.gpu.prefill import prefill_attention
from headrace.kernels.gpu.shapes import Attention
from headrace.kernels.lists import ints
from tests.support.paged_cases import Case

from .afar import how_on, on_device, same_bits
from .decode import make, options
from .notebook import Notebook
from .sizes import NAMES, CheckSizes, Heads, check_sizes

TITLE = "Prefill attention"
HOW = "As decode: prompts, chunks of them behind what is cached, single rows and padding between."


def find(notes: Notebook) -> None:
    """Do all checks of prefill."""
    sizes = check_sizes(notes.ground.dry)
    for kind in sizes.heads:
        for cached in sizes.cached:
            name = f"head {kind.name}, {NAMES[cached]}"
            notes.check(f"{name}: prompts and chunks", partial(_right, notes, kind, cached, sizes))
            notes.check(f"{name}: neighbours and two runs", partial(_neighbours, notes, kind, cached, sizes))


def prefilled(case: Case, how: Attention, device: torch.device) -> torch.Tensor:
    """The result, on the CPU, written into NaN."""
    there = on_device(case, device)
    out = there.empty_out()
    prefill_attention(
        there.query, there.k_cache, there.v_cache, there.paging, out, how_on(case, how, device), device_capability()
    )
    return out.cpu()


def _right(notes: Notebook, kind: Heads, cached: torch.dtype, sizes: CheckSizes) -> None:
    case = make(kind, cached, sizes.prompts)
    how = options(case, kind)
    case.check(prefilled(case, how, notes.ground.device), how, case.rows_of() & ~case.rows_of(1))


def _neighbours(notes: Notebook, kind: Heads, cached: torch.dtype, sizes: CheckSizes) -> None:
    case, device = make(kind, cached, sizes.prompts), notes.ground.device
    how = options(case, kind)
    batch = prefilled(case, how, device)
    same_bits(prefilled(case, how, device), batch)
    starts = ints(case.paging.query_start)
    for number, (keys, queries) in enumerate(case.lengths):
        if keys and queries > 1:
            alone = prefilled(case.alone(number), how, device)
            same_bits(alone, batch[starts[number] : starts[number + 1]])
