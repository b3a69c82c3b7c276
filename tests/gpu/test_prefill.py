"""Attention of prompts, chunks and drafts against float64 attention, and what its bits depend on.

`test_field_faults.py` has what went wrong in other engines.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from headrace.kernels.attention import Paging
from headrace.kernels.gpu.prefill import prefill_attention, tiles
from headrace.kernels.gpu.shapes import Attention
from tests.support.paged_cases import CACHED, Case, make_case

SINKS = torch.tensor([-200.0, -1.0, 0.5, 2.0, 9.0, 1.5])  # below all scores, among them and above
MIXED = [(1, 1), (5, 5), (0, 0), (31, 2), (0, 2), (100, 7), (40, 0), (33, 1), (70, 33)]


def run(case: Case, how: Attention, capability: int = 90) -> torch.Tensor:
    out = case.empty_out()
    prefill_attention(case.query, case.k_cache, case.v_cache, case.paging, out, how, capability)
    return out


def check(case: Case, **options: object) -> None:
    """Compare, also that rows of single queries, of sequences without keys and of padding stay NaN."""
    how = case.how(**options)
    case.check(run(case, how), how, case.rows_of() & ~case.rows_of(1))


@pytest.mark.parametrize("cached", CACHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prompts_and_chunks_among_single_rows_and_padding(dtype: torch.dtype, cached: torch.dtype) -> None:
    lengths = MIXED if dtype == cached else MIXED[:6]
    check(make_case(lengths, dtype=dtype, cached=cached, heads=2, kv_heads=1))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize(("dtype", "cached"), [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8)])
def test_every_choice_of_tiles(dtype: torch.dtype, cached: torch.dtype, head_dim: int, capability: int) -> None:
    case = make_case([(150, 40), (20, 1)], dtype=dtype, cached=cached, head_dim=head_dim, kv_heads=1)
    how = case.how(window=50)
    case.check(run(case, how, capability), how, case.rows_of() & ~case.rows_of(1))


@pytest.mark.parametrize("block_size", [4, 16, 32, 128])
@pytest.mark.parametrize("cached", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e5m2])
def test_block_sizes(cached: torch.dtype, block_size: int) -> None:
    lengths = [(150, 20), (129, 3), (31, 1)]
    check(make_case(lengths, dtype=torch.bfloat16, cached=cached, block_size=block_size, window=40), window=40)


@pytest.mark.parametrize("head_dim", [8, 10, 16, 24, 72, 100, 120, 128, 256])
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.int8])
def test_head_sizes(cached: torch.dtype, head_dim: int) -> None:
    check(make_case([(37, 1), (90, 9)], dtype=torch.bfloat16, cached=cached, head_dim=head_dim, heads=2))


@pytest.mark.parametrize(("dtype", "cached"), [(torch.float32, torch.float32), (torch.float16, torch.float8_e4m3fn)])
def test_large_heads_of_other_types(dtype: torch.dtype, cached: torch.dtype) -> None:
    check(make_case([(37, 1), (90, 9)], dtype=dtype, cached=cached, head_dim=256, heads=2, kv_heads=1))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (4, 2), (6, 1), (24, 3), (64, 1), (100, 1)])
def test_query_heads_per_kv_head(heads: int, kv_heads: int) -> None:
    check(make_case([(35, 1), (70, 9), (11, 2), (5, 5)], heads=heads, kv_heads=kv_heads, dtype=torch.bfloat16))


@pytest.mark.parametrize("window", [1, 2, 5, 31, 32, 33, 63, 64, 65, 96, 150, 500])
def test_window(window: int) -> None:
    """Blocks before the window are 2^30 in the table, and the rest of a block that it cuts holds NaN."""
    lengths = [(90, 1), (97, 40), (33, 2), (200, 3)]
    case = make_case(lengths, block_size=4, window=window, heads=2, kv_heads=1, cached=torch.bfloat16)
    check(case, window=window, sinks=SINKS[:2])


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("cached", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_soft_cap(cached: torch.dtype, soft_cap: float) -> None:
    case = make_case([(40, 1), (70, 20)], cached=cached, heads=2, kv_heads=1)
    check(case, soft_cap=soft_cap, scale=1.0)


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.int8, torch.float8_e5m2])
@pytest.mark.parametrize("window", [0, 40])
def test_a_sink_for_each_head(cached: torch.dtype, window: int) -> None:
    case = make_case([(130, 9), (1, 1), (5, 5)], heads=6, dtype=torch.bfloat16, cached=cached, window=window)
    check(case, window=window, sinks=SINKS, soft_cap=5.0 if window else 0.0)
    gone = run(case, case.how(window=window, sinks=torch.full((6,), -1e30)))
    assert torch.equal(gone.nan_to_num(9.0), run(case, case.how(window=window)).nan_to_num(9.0))


def test_a_sink_that_is_not_a_number_comes_out() -> None:
    case = make_case([(40, 2)], padding=0)
    got = run(case, case.how(sinks=torch.tensor([0.0, float("nan"), 0.0, 0.0])))
    assert got[:, 1].isnan().all() and got[:, [0, 2, 3]].isfinite().all()


def test_large_scores_stay_finite() -> None:
    case = make_case([(70, 70), (100, 2)], padding=0)
    got = run(case, case.how(scale=250.0))
    assert torch.isfinite(got).all()
    assert (got.double() - case.reference(case.how(scale=250.0))[0]).abs().max() < 1e-2  # nearly all weight on one key


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (45, 5.0)])
def test_bits_do_not_depend_on_neighbours(cached: torch.dtype, window: int, soft_cap: float) -> None:
    lengths = [(77, 1), (130, 33), (0, 0), (130, 2), (20, 20)]
    case = make_case(lengths, heads=3, kv_heads=1, dtype=torch.bfloat16, cached=cached, window=window)
    how = case.how(window=window, soft_cap=soft_cap, sinks=SINKS[:3])
    got = run(case, how)
    starts = case.paging.query_start.tolist()
    for sequence in (1, 3, 4):
        alone = run(case.alone(sequence), how)
        assert torch.equal(alone, got[starts[sequence] : starts[sequence + 1]]), sequence


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [0, 45])
def test_bits_do_not_depend_on_chunks(cached: torch.dtype, window: int) -> None:
    """Where a product of matrices gives a row the same bits wherever it stands, as the interpreter's does."""
    case = make_case([(130, 130)], heads=3, kv_heads=1, dtype=torch.bfloat16, cached=cached, padding=0)
    how = case.how(window=window, sinks=SINKS[:3])
    want = run(case, how)
    for cuts in ([0, 2, 9, 80, 130], [0, 64, 130]):
        for begin, end in pairwise(cuts):
            paging = Paging(case.paging.block_table, torch.tensor([0, end - begin]).int(), torch.tensor([end]).int(), 0)
            part = run(replace(case, query=case.query[begin:end], paging=paging), how)
            assert torch.equal(part, want[begin:end]), (begin, end)


@pytest.mark.parametrize("drafts", [2, 5, 8])
def test_drafts_behind_long_contexts(drafts: int) -> None:
    lengths = [(500, drafts), (300, 1), (257, drafts), (0, 0), (64 + drafts, drafts)]
    check(make_case(lengths, heads=4, kv_heads=1, dtype=torch.bfloat16, cached=torch.float8_e4m3fn))


def test_rows_of_one_tensor_of_queries_keys_and_values() -> None:
    """Query and result may be views whose rows lie further apart than their heads say."""
    case = make_case(MIXED, heads=6, dtype=torch.bfloat16)
    wide = torch.full((len(case.query), 10, 16), float("nan"), dtype=torch.bfloat16)
    wide[:, :6] = case.query
    place = torch.full((len(case.query), 7, 16), float("nan"), dtype=torch.bfloat16)
    prefill_attention(wide[:, :6], case.k_cache, case.v_cache, case.paging, place[:, :6], case.how())
    case.check(place[:, :6], case.how(), case.rows_of() & ~case.rows_of(1))
    assert place[:, 6].isnan().all()


def test_nothing_is_launched_for_single_rows_and_float8_needs_scales() -> None:
    case = make_case([(20, 1), (30, 1)], cached=torch.float8_e5m2)
    assert run(case, case.how()).isnan().all()
    with pytest.raises(ValueError, match="float8 needs kv_scales"):
        run(case, replace(case.how(), kv_scales=None))


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_tiles_fit_where_they_must(capability: int) -> None:
    for head_dim in (16, 64, 80, 96, 128, 192, 256):
        for product in (torch.float32, torch.bfloat16):
            for cached in (product, torch.int8, torch.float8_e5m2):
                tile = tiles(head_dim, product, cached, capability)
                width = 1 << (head_dim - 1).bit_length()
                in_flight = 2 * tile.keys * width * cached.itemsize * (tile.stages - 1)
                assert tile.rows * width * product.itemsize + in_flight <= 166_912
                assert tile.rows >= 16 and tile.keys >= 16
