"""Faults of the field put into the kernel for prompts, each of which the checks must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from headrace.kernels.gpu import prefill as sound
from tests.support.attention_checks import prefilled
from tests.support.mutations import Fault, assert_found
from tests.support.paged_cases import make_case

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what faults make of numbers
SINKS = torch.tensor([0.5, -1.0, 2.0, 1.0])


def rows(prefill: ModuleType) -> None:
    """Sequences of all kinds, and queries and results whose rows lie apart, each in its own way."""
    case = make_case([(1, 1), (33, 3), (0, 2), (90, 33)], heads=6)
    prefilled(prefill, case)
    wide, place = (torch.full((len(case.query), heads, 16), float("nan")) for heads in (9, 7))
    wide[:, 1:7] = case.query
    prefill.prefill_attention(wide[:, 1:7], case.k_cache, case.v_cache, case.paging, place[:, :6], case.how())
    case.check(place[:, :6], case.how(), case.rows_of() & ~case.rows_of(1))
    assert place[:, 6].isnan().all()


def windows(prefill: ModuleType) -> None:
    for window, length in ((40, 97), (33, 129), (3, 70)):
        prefilled(
            prefill, make_case([(length, 40)], window=window, heads=2, kv_heads=1), window=window, sinks=SINKS[:2]
        )


def int8(prefill: ModuleType) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        prefilled(prefill, make_case([(40, 3), (37, 2)], dtype=dtype, cached=torch.int8), sinks=SINKS)


def float8(prefill: ModuleType) -> None:
    case = make_case([(40, 3)], cached=torch.float8_e4m3fn)
    prefilled(prefill, case)
    prefilled(prefill, case, soft_cap=2.0, scale=1.0)


def widths(prefill: ModuleType) -> None:
    """Heads that do not fill their tiles, the first block at the very end of the caches."""
    case = make_case([(40, 2)], heads=1, kv_heads=1, head_dim=24, block_size=32)
    table = case.paging.block_table.clone()
    first, last = int(table[0, 0]), len(case.k_cache) - 1
    for cache in (case.k_cache, case.v_cache):
        cache[[first, last]] = cache[[last, first]]
    table[case.paging.block_table == last], table[0, 0] = first, last
    prefilled(prefill, replace(case, paging=replace(case.paging, block_table=table)))


FAULTS: list[tuple[Callable[[ModuleType], None], Fault]] = [
    (rows, Fault("prefill", "+ middle <= tile", "+ middle < tile")),
    (rows, Fault("prefill", "rows * group // tile.rows + num_seqs", "rows * group // tile.rows")),
    (rows, Fault("prefill", "- begin_row * GROUP // ROWS) * ROWS", "- begin_row * GROUP // ROWS + 1) * ROWS")),
    (rows, Fault("prefill", "(queries < 2) |", "(queries < 1) |")),
    (rows, Fault("prefill", "| (length == 0)", "| (length < 0)")),
    (rows, Fault("prefill", "real = row < queries * GROUP", "real = row <= queries * GROUP")),
    (rows, Fault("prefill", "position = length - queries + row // GROUP", "position = length - queries + row")),
    (rows, Fault("prefill", "first_row // GROUP\n", "first_row // GROUP + 1\n")),
    (rows, Fault("prefill", "// GROUP, queries - 1) + 1", "// GROUP, queries - 1)")),
    (rows, Fault("prefill", "head = kv_head * GROUP + row % GROUP", "head = row % GROUP * KV_HEADS + kv_head")),
    (rows, Fault("prefill", "vector * query_pitch", "vector * out_pitch")),
    (rows, Fault("prefill", "vector * out_pitch", "vector * query_pitch")),
    (rows, Fault("prefill", "seq.to(tl.int64) * table_stride", "seq.to(tl.int64) * (table_stride - 1)")),
    (rows, Fault("prefill", "<= position[:, None]", "< position[:, None]")),
    (rows, Fault("prefill", "<= position[:, None]", "<= position[:, None] + 1")),
    (rows, Fault("prefill", "(key >= low) & (key < high)\n", "key >= low\n")),
    (rows, Fault("prefill", "_block_ids(table, key + KEYS,", "_block_ids(table, key,")),
    (rows, Fault("prefill", "key // BLOCK_SIZE, mask", "key % BLOCK_SIZE, mask")),
    (rows, Fault("prefill", "kv_head * BLOCK_SIZE + key % BLOCK_SIZE", "key % BLOCK_SIZE * KV_HEADS + kv_head")),
    (rows, Fault("prefill", "(first_position + 1) // KEYS * KEYS", "tl.cdiv(first_position + 1, KEYS) * KEYS")),
    (rows, Fault("prefill", "weight_sum * old +", "weight_sum +")),
    (rows, Fault("prefill", "total *= old[:, None]", "total *= 1.0")),
    (windows, Fault("prefill", "(key >= low) & (key < high)\n", "key < high\n")),
    (windows, Fault("prefill", "> position[:, None] - window", ">= position[:, None] - window")),
    (windows, Fault("prefill", "> position[:, None] - window", "> position[:, None] - window + 1")),
    (windows, Fault("prefill", "first_position - window + 1, 0)", "first_position - window + 2, 0)")),
    (windows, Fault("prefill", "first_position - window + 1, 0)", "first_position - window, 0)")),
    (
        windows,
        Fault("prefill", "tl.cdiv(tl.maximum(high - window, 0), KEYS)", "(tl.maximum(high - window, 0) // KEYS)"),
    ),
    (windows, Fault("prefill", 'tl.where(new_top == float("-inf"), 0.0, new_top)', "new_top")),
    (windows, Fault("prefill", "tl.load(sinks + head, mask=real, other=0.0) * _LOG2_E", "-1e9")),
    (windows, Fault("prefill", "tl.load(sinks + head, mask=real, other=0.0)", "tl.load(sinks + kv_head)")),
    (int8, Fault("prefill", "score *= k_scale[None, :]", "score *= 1.0")),
    (int8, Fault("prefill", "weight *= v_scale[None, :]", "weight *= 1.0")),
    (int8, Fault("prefill", "v_scale / most", "v_scale")),
    (int8, Fault("prefill", "v.to(q.dtype)) * most", "v.to(q.dtype))")),
    (int8, Fault("prefill", "wide_block * STRIDE +", "wide_block * VECTORS +")),
    (int8, Fault("prefill", "wide_block * (STRIDE // 4)", "wide_block * (VECTORS // 4)")),
    (int8, Fault("prefill", "+ VECTORS // 4 + slot", "+ VECTORS // 4 + key % BLOCK_SIZE")),
    (float8, Fault("prefill", "k_scale = tl.load(kv_scales + kv_head)", "k_scale = tl.load(kv_scales)")),
    (float8, Fault("prefill", "factor = factor * k_scale", "factor = factor")),
    (float8, Fault("prefill", "inner = inner * k_scale", "inner = inner")),
    (float8, Fault("prefill", "result = result * tl.load(kv_scales + KV_HEADS + kv_head)", "result = result")),
    (float8, Fault("prefill", "tl.load(kv_scales + KV_HEADS + kv_head)", "tl.load(kv_scales + kv_head)")),
    (float8, Fault("prefill", "2.0 * factor / how.soft_cap", "factor / how.soft_cap")),
    (float8, Fault("prefill", "score = 1.0 - 2.0 /", "score = 1.0 - 1.0 /")),
    (widths, Fault("prefill", "elif WIDTH > HEAD_DIM", "elif False")),
    (widths, Fault("prefill", "inside[:, None] & (dim < HEAD_DIM)[None, :]", "inside[:, None]", times=2)),
    (widths, Fault("prefill", "real[:, None] & (dim < HEAD_DIM)[None, :]", "real[:, None]")),
]


@pytest.mark.parametrize(("check", "fault"), FAULTS, ids=[str(fault) for _, fault in FAULTS])
def test_each_fault_is_found(check: Callable[[ModuleType], None], fault: Fault) -> None:
    assert_found(fault, check, "prefill")


@pytest.mark.parametrize("check", [rows, windows, int8, float8, widths])
def test_the_checks_pass_where_nothing_is_changed(check: Callable[[ModuleType], None]) -> None:
    check(sound)
