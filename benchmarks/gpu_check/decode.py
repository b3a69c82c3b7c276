"""Decode attention on the device: right at real shapes, and the same bits whoever is beside and whatever is shared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from headrace.kernels.gpu.decode import decode_attention
from headrace.kernels.gpu.shapes import Attention
from headrace.kernels.lists import ints
from tests.support.paged_cases import Case, make_case, shared_prefix

from .afar import how_on, on_device, poisoned, same_bits
from .notebook import Notebook
from .sizes import NAMES, CheckSizes, Heads, Lengths, check_sizes

TITLE = "Decode attention"
HOW = (
    "Cases over paged caches, with NaN in all that nobody may read, made on the CPU and held against float64 there; "
    "tolerances as in tests/support/tolerances.py. Bits: a sequence alone against the same in the batch, blocks that "
    "are shared read once against each for itself, and one run against another."
)


def find(notes: Notebook) -> None:
    """Do all checks of decode."""
    sizes = check_sizes(notes.ground.dry)
    for kind in sizes.heads:
        for cached in sizes.cached:
            name = f"head {kind.name}, {NAMES[cached]}"
            notes.check(f"{name}: one split", partial(_right, notes, kind, cached, sizes, sizes.one_split))
            notes.check(f"{name}: many splits", partial(_right, notes, kind, cached, sizes, sizes.many_splits))
            notes.check(f"{name}: neighbours and two runs", partial(_neighbours, notes, kind, cached, sizes))
            if not kind.window:
                notes.check(f"{name}: shared prefix", partial(_shared, notes, kind, cached, sizes))


def make(
    kind: Heads, cached: torch.dtype, lengths: Lengths, prefixes: Sequence[tuple[Sequence[int], int]] = ()
) -> Case:
    """A case of a kind of model, in bfloat16."""
    return make_case(
        lengths, heads=kind.heads, kv_heads=kind.kv_heads, head_dim=kind.head_dim, dtype=torch.bfloat16, cached=cached,
        window=kind.window, prefixes=prefixes,
    )  # fmt: skip


def options(case: Case, kind: Heads) -> Attention:
    """How such a model attends."""
    return case.how(window=kind.window, soft_cap=kind.soft_cap, sinks=torch.linspace(-2.0, 4.0, kind.heads))


def decoded(case: Case, how: Attention, split: int, device: torch.device, splits: int = 0) -> torch.Tensor:
    """The result, on the CPU, written into NaN."""
    there = on_device(case, device)
    out = there.empty_out()
    splits = splits or max(-(-keys // split) for keys, _ in case.lengths)
    scratch = poisoned(there, splits, split, device)
    decode_attention(there.query, there.k_cache, there.v_cache, there.paging, out, how_on(case, how, device), scratch)
    return out.cpu()


def _right(notes: Notebook, kind: Heads, cached: torch.dtype, sizes: CheckSizes, lengths: Lengths) -> None:
    case = make(kind, cached, lengths)
    how = options(case, kind)
    case.check(decoded(case, how, sizes.split, notes.ground.device), how, case.rows_of(1))


def _neighbours(notes: Notebook, kind: Heads, cached: torch.dtype, sizes: CheckSizes) -> None:
    case, device = make(kind, cached, sizes.many_splits), notes.ground.device
    how = options(case, kind)
    most = max(-(-keys // sizes.split) for keys, _ in case.lengths)
    batch = decoded(case, how, sizes.split, device)
    same_bits(decoded(case, how, sizes.split, device), batch)
    starts = ints(case.paging.query_start)
    for number, (keys, queries) in enumerate(case.lengths):
        if keys and queries == 1:
            alone = decoded(case.alone(number), how, sizes.split, device, most)
            same_bits(alone[0], batch[starts[number]])


def _shared(notes: Notebook, kind: Heads, cached: torch.dtype, sizes: CheckSizes) -> None:
    lengths = tuple((sizes.prefix + 1 + 13 * number, 1) for number in range(5))
    tiles = [((1, 0, 3), sizes.prefix)]
    case, device = make(kind, cached, lengths, tiles), notes.ground.device
    how = options(case, kind)
    got = decoded(shared_prefix(case, tiles, per_tile=4), how, sizes.split, device)
    case.check(got, how, case.rows_of(1))
    same_bits(got, decoded(case, how, sizes.split, device))
