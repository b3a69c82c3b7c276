"""What went wrong in the kernels of other engines, each a test that passes on ours and fails with the fault put in.

A test's name says the fault, its first line what happened and where. Faults of what stores, copies and draws, and of
launches, are in `test_field_faults_around.py`.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.support.attention_checks import decoded, far_blocks, prefilled, untouched
from tests.support.mutations import Fault, seen_with
from tests.support.paged_cases import NOBODY, Case, make_case, poisoned_scratch, shared_prefix

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what faults make of numbers
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@seen_with("decode", Fault("split_keys", "block = blocks.to(tl.int64)", "block = blocks"))
def test_block_offset_beyond_int32_in_decode(decode: ModuleType) -> None:
    """In vLLM (PR 47671) page 7768 of 480 · 576 values began beyond 2³¹, and other memory was read."""
    decoded(decode, far_blocks(make_case([(12, 1)], kv_heads=1, heads=2, head_dim=64, cached=torch.int8)))


@seen_with("prefill", Fault("prefill", "wide_block = block.to(tl.int64)", "wide_block = block"))
def test_block_offset_beyond_int32_in_prefill(prefill: ModuleType) -> None:
    """As in decode: vLLM PR 47671."""
    case = make_case([(70, 9), (40, 2)], kv_heads=1, heads=2, head_dim=64, cached=torch.int8, dtype=torch.bfloat16)
    prefilled(prefill, far_blocks(case))


@seen_with(
    "decode prefill",
    Fault("decode", "seq.to(tl.int64) * table_stride", "seq * table_stride"),
    Fault("split_keys", "return row.to(tl.int64)", "return row"),
    Fault("prefill", "seq.to(tl.int64) * table_stride", "seq * table_stride"),
    Fault("prefill", "(begin_row + row // GROUP).to(tl.int64)", "begin_row + row // GROUP"),
)
def test_rows_of_queries_and_tables_beyond_int32(decode: ModuleType, prefill: ModuleType) -> None:
    """As vLLM PR 47671, of every other stride that a server may make large."""
    case = make_case([(20, 1), (40, 9), (30, 1), (20, 2)], heads=2, kv_heads=1)
    table = untouched((4, 2**30 + 8), torch.int32)[:, : case.paging.block_table.shape[1]]
    table.copy_(case.paging.block_table)
    pitch = (2**31 // 8) // 16 * 16
    query = untouched((len(case.query), pitch), torch.float32)[:, :32].view(-1, 2, 16)
    query.copy_(case.query)
    case = replace(case, query=query, paging=replace(case.paging, block_table=table))
    prefilled(prefill, case)
    decoded(decode, case)


def narrow(lengths: list[tuple[int, int]]) -> Case:
    """A batch whose table is no longer than its longest, last sequence: entries beyond lie outside of the tensor."""
    case = make_case(lengths, heads=2, kv_heads=1)
    table = case.paging.block_table[:, : -(-lengths[-1][0] // 16)].contiguous()
    assert (table[-1] != NOBODY).all()
    return replace(case, paging=replace(case.paging, block_table=table))


@seen_with(
    "decode prefill",
    Fault("split_keys", "following // BLOCK_SIZE, mask=following < end, other=0", "following // BLOCK_SIZE"),
    Fault("prefill", "key // BLOCK_SIZE, mask=(key >= low) & (key < high), other=0", "key // BLOCK_SIZE"),
)
def test_unmasked_tail_of_the_block_table(decode: ModuleType, prefill: ModuleType) -> None:
    """In vLLM (PR 56862) block ids were loaded for a whole tile of keys, past the end of the table's last row."""
    decoded(decode, narrow([(129, 1), (150, 1), (160, 1)]))
    prefilled(prefill, narrow([(100, 2), (112, 3)]))


@seen_with(
    "decode prefill",
    Fault("split_keys", "mask=(dim < HEAD_DIM)[None, :] & seen[:, None]", "mask=(dim < HEAD_DIM)[None, :]"),
    Fault("prefill", "(key >= low) & (key < high)\n", "key < high\n"),
)
def test_nan_in_a_page_outside_of_the_window(decode: ModuleType, prefill: ModuleType) -> None:
    """In vLLM (PR 30887) pages before the window had been freed, held another's NaN, and 0 · NaN is NaN."""
    for kernel, queries in ((decode, 1), (prefill, 3)):
        case = make_case([(100, queries)], window=30, heads=2, kv_heads=1)
        table = case.paging.block_table.clone()
        table[0, :4] = 0  # given to somebody else
        assert case.k_cache[0].isnan().all() and case.v_cache[0].isnan().all()
        case = replace(case, paging=replace(case.paging, block_table=table))
        (decoded if queries == 1 else prefilled)(kernel, case, window=30)


@seen_with(
    "decode",
    Fault("merge", "any_split < to_split", "any_split < SPLITS"),
    Fault("merge", "is_live = split < to_split", "is_live = split < SPLITS"),
)
def test_empty_split_merged_from_uninitialised_scratch(decode: ModuleType) -> None:
    """In vLLM (PR 47188) a split without keys wrote nothing, and what an earlier step had left there was merged."""
    first, second = make_case([(300, 1), (300, 1)], seed=1), make_case([(70, 1), (0, 1)])
    scratch = poisoned_scratch(first, 5, 64)
    for case in (first, second):
        out = case.empty_out()
        decode.decode_attention(case.query, case.k_cache, case.v_cache, case.paging, out, case.how(), scratch)
        case.check(out, case.how(), case.rows_of(1))


@seen_with(
    "decode",
    Fault("split_keys", "tl.maximum(length - WINDOW, 0)", "tl.maximum(length - WINDOW - 1, 0)"),
    Fault("split_keys", "tl.maximum(length - WINDOW, 0)", "tl.maximum(length - WINDOW + 1, 0)"),
)
def test_window_one_off_in_decode(decode: ModuleType) -> None:
    """In sglang (PR 32087) a window was one off: of 5000 keys, 4096 are 904 to 4999."""
    case = make_case([(5000, 1)], window=4096, heads=1, kv_heads=1, padding=0)  # what it does not see is NaN
    values = case.v_cache[int(case.paging.block_table[0, 904 // 16])].view(16, 16)
    assert values[904 % 16 - 1].isnan().all() and values[904 % 16].isfinite().all()
    decoded(decode, case, 1024, window=4096)
    values[904 % 16] = 1e6  # the first that it sees
    assert decoded(decode, case, 1024, compare=False, window=4096).abs().max() > 10.0


@seen_with(
    "prefill",
    Fault("prefill", "> position[:, None] - window", ">= position[:, None] - window"),
    Fault("prefill", "first_position - window + 1, 0)", "first_position - window + 2, 0)"),
    Fault("prefill", "first_position - window + 1, 0)", "first_position - window, 0)"),
)
def test_window_one_off_in_prefill(prefill: ModuleType) -> None:
    """As in decode: sglang PR 32087. The query before the last sees 903 as well."""
    case = make_case([(5000, 2)], window=4096, heads=1, kv_heads=1, dtype=torch.bfloat16, padding=0)
    want = prefilled(prefill, case, window=4096)
    for key, seen in ((903, [True, False]), (904, [True, True]), (4999, [False, True])):
        changed = replace(case, v_cache=case.v_cache.clone())
        changed.v_cache.view(-1, 16, 16)[int(case.paging.block_table[0, key // 16]), key % 16] += 1000.0
        got = prefilled(prefill, changed, compare=False, window=4096)
        assert [bool((got[row] != want[row]).any()) for row in range(2)] == seen


def without_mask(module: str, mask: str) -> Fault:
    """As for heads that fill a tile of a power of two."""
    return Fault(module, mask, mask.replace("dim < HEAD_DIM", "dim < WIDTH"))


@pytest.mark.parametrize("head_dim", [80, 96, 192])
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.int8])
def test_head_dim_that_is_no_power_of_two(cached: torch.dtype, head_dim: int) -> None:
    """Kernels of several engines refused 80, 96 and 192, or took their neighbours' values for the rest of a tile."""
    from headrace.kernels.gpu import decode, prefill

    check_head_dim(decode, prefill, head_dim, cached)


def check_head_dim(decode: ModuleType, prefill: ModuleType, head_dim: int, cached: torch.dtype) -> None:
    sizes = {"heads": 2, "kv_heads": 1, "dtype": torch.bfloat16, "cached": cached, "head_dim": head_dim}
    decoded(decode, make_case([(37, 1), (4, 2), (70, 1)], **sizes))
    prefilled(prefill, make_case([(37, 1), (70, 9)], **sizes))
    tiles = [((1, 0), 128)]
    decoded(decode, shared_prefix(make_case([(130, 1), (140, 1)], prefixes=tiles, **sizes), tiles, 2))


@seen_with(
    "decode prefill",
    without_mask("decode", "is_head[:, None] & (dim < HEAD_DIM)[None, :]"),
    without_mask("merge", "mask=dim < HEAD_DIM"),
    without_mask("shared_prefix", "is_live[:, None] & (dim < HEAD_DIM)[None, :]"),
    without_mask("split_keys", "(dim < HEAD_DIM)[:, None]"),
    without_mask("prefill", "real[:, None] & (dim < HEAD_DIM)[None, :]"),
)
def test_head_dim_masks(decode: ModuleType, prefill: ModuleType) -> None:
    """The faults of `test_head_dim_that_is_no_power_of_two`."""
    check_head_dim(decode, prefill, 96, torch.bfloat16)


@seen_with(
    "decode prefill",
    Fault("decode", "is_head = in_group < GROUP", "is_head = in_group < ROWS"),
    Fault("decode", "kv_heads * -(-group // rows)", "kv_heads"),
    Fault("prefill", "head = kv_head * GROUP + row % GROUP", "head = kv_head * GROUP + row % 8"),
    Fault("shared_prefix", "kv_head * GROUP + number % GROUP", "kv_head * GROUP + number % 8"),
)
def test_query_heads_per_kv_head_that_are_no_power_of_two(decode: ModuleType, prefill: ModuleType) -> None:
    """Ratios of 6, 7 (Qwen2.5) and 48 (StarCoder): heads of the next group were computed in this one, or none."""
    tiles = [((1, 0), 64)]
    for ratio in (6, 7):
        sinks = torch.linspace(-2, 4, 2 * ratio)
        case = make_case([(66, 1), (70, 1), (5, 5), (40, 2)], prefixes=tiles, heads=2 * ratio, kv_heads=2)
        prefilled(prefill, case, sinks=sinks)
        decoded(decode, shared_prefix(case, tiles, 2), sinks=sinks)
    case = make_case([(60, 1), (40, 3)], heads=48, kv_heads=1, head_dim=256)  # more than a program takes
    prefilled(prefill, case)
    decoded(decode, case)


@pytest.mark.parametrize("cached", FLOAT8)
def test_float8_without_scales_is_refused(cached: torch.dtype) -> None:
    """In vLLM (PR 42580) and sglang (PR 18882), where scales were missing they became 1, and models talked nonsense."""
    from headrace.kernels.gpu import decode, prefill, rotary

    case = make_case([(37, 1)], cached=cached)
    where = case.paging, case.empty_out(), replace(case.how(), kv_scales=None)
    with pytest.raises(ValueError, match="needs kv_scales"):
        decode.decode_attention(case.query, case.k_cache, case.v_cache, *where, poisoned_scratch(case, 1, 64))
    with pytest.raises(ValueError, match="needs kv_scales"):
        prefill.prefill_attention(case.query, case.k_cache, case.v_cache, *where)
    with pytest.raises(ValueError, match="needs kv_scales"):
        rotary.rotate_and_store(
            torch.zeros(1, 8 * 16), torch.zeros(1, dtype=torch.int64), None, case.k_cache, case.v_cache,
            torch.zeros(1, dtype=torch.int64),
        )  # fmt: skip


@seen_with(
    "decode prefill",
    Fault("decode", "scale *= tl.load(kv_scales + kv_head)", "scale *= 1.0"),
    Fault("decode", "factor *= tl.load(kv_scales + KV_HEADS + kv_head)", "factor *= 1.0"),
    Fault("shared_prefix", "scale *= tl.load(kv_scales + kv_head)", "scale *= 1.0"),
    Fault("shared_prefix", "factor *= tl.load(kv_scales + KV_HEADS + kv_head)", "factor *= 1.0"),
    Fault("prefill", "k_scale = tl.load(kv_scales + kv_head)", "k_scale = 1.0"),
    Fault("prefill", "result * tl.load(kv_scales + KV_HEADS + kv_head)", "result"),
)
def test_float8_scale_dropped(decode: ModuleType, prefill: ModuleType) -> None:
    """In vLLM (PR 42580) and sglang (PR 18882) one path of several forgot a scale."""
    tiles = [((1, 0), 64)]
    case = make_case([(66, 1), (70, 1), (40, 3)], prefixes=tiles, cached=FLOAT8[0])
    prefilled(prefill, case)
    decoded(decode, case)
    decoded(decode, shared_prefix(case, tiles, 2))
