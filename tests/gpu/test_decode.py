"""Decode attention against float64 attention; `test_field_faults.py` has what went wrong in other engines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.kernels.attention import Paging, paged_attention
from headrace.kernels.gpu.decode import decode_attention
from headrace.kernels.gpu.shapes import Attention
from headrace.kernels.kv_layout import by_position
from tests.support.interpreter import KernelFaultError
from tests.support.paged_cases import CACHED, NOBODY, Case, make_case, poisoned_scratch

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def run(case: Case, how: Attention, split: int = 64, splits: int = 0) -> torch.Tensor:
    """Decode into NaN, with scratch of NaN for the longest sequence or for so many splits."""
    out = case.empty_out()
    splits = splits or max(1, *(-(-keys // split) for keys, _ in case.lengths))
    scratch = poisoned_scratch(case, splits, split)
    decode_attention(case.query, case.k_cache, case.v_cache, case.paging, out, how, scratch)
    return out


def check(case: Case, split: int = 64, splits: int = 0, **options: object) -> torch.Tensor:
    how = case.how(**options)
    out = run(case, how, split, splits)
    case.check(out, how, case.rows_of(1))
    return out


# around blocks of 16 and splits of 64; with sequences of more queries, of no keys and of no rows between
RAGGED = [(1, 1), (5, 5), (16, 1), (17, 1), (0, 1), (63, 1), (64, 1), (65, 1), (0, 0), (100, 7), (9, 0), (300, 1)]
SINKS = torch.tensor([-200.0, -1.0, 0.5, 2.0, 9.0, 1.5])  # below all scores, among them and above


@pytest.mark.parametrize("cached", CACHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype, cached: torch.dtype) -> None:
    check(make_case([(65, 1), (5, 5), (0, 1), (17, 1)], dtype=dtype, cached=cached, heads=2, kv_heads=1))


def test_ragged_lengths() -> None:
    check(make_case(RAGGED, heads=2, kv_heads=1))


@pytest.mark.parametrize("cached", [torch.float32, torch.int8])
@pytest.mark.parametrize("head_dim", [10, 16, 64, 100, 128, 256])
def test_head_sizes(head_dim: int, cached: torch.dtype) -> None:
    dtype = torch.float32 if cached == torch.float32 else torch.bfloat16
    check(make_case([(37, 1), (4, 2), (150, 1)], head_dim=head_dim, dtype=dtype, cached=cached, kv_heads=1, heads=2))


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(3, 3), (4, 2), (6, 2), (8, 2), (16, 1), (64, 1), (130, 1)],
)
def test_query_heads_per_kv_head(heads: int, kv_heads: int) -> None:
    check(make_case([(35, 1)], heads=heads, kv_heads=kv_heads), sinks=torch.linspace(-2, 4, heads))
    if heads < 64:
        check(make_case([(70, 1)], heads=heads, kv_heads=kv_heads), sinks=torch.linspace(-2, 4, heads))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_more_query_heads_than_a_program_takes_at_any_head_size(head_dim: int) -> None:
    check(make_case([(40, 1)], heads=48, kv_heads=1, head_dim=head_dim))


@pytest.mark.parametrize("block_size", [4, 16, 64, 256])
@pytest.mark.parametrize("cached", [torch.float32, torch.int8])
def test_block_sizes(cached: torch.dtype, block_size: int) -> None:
    check(make_case([(3, 1), (64, 1), (150, 1)], cached=cached, block_size=block_size))


@pytest.mark.parametrize("split", [64, 128, 256])
def test_splits_of_some_tiles(split: int) -> None:
    check(make_case([(1, 1), (split - 1, 1), (split, 1), (split + 1, 1), (2 * split + 65, 1)], kv_heads=1), split)


def test_one_split_needs_no_merge_and_no_scratch() -> None:
    case = make_case([(100, 1), (256, 1), (7, 1)], padding=0)
    scratch = poisoned_scratch(case, 1, 256)
    out = case.empty_out()
    decode_attention(case.query, case.k_cache, case.v_cache, case.paging, out, case.how(), scratch)
    case.check(out, case.how(), case.rows_of(1))
    assert scratch.parts.isnan().all() and scratch.lse.isnan().all()


def test_many_splits() -> None:
    check(make_case([(64 * 21 + 3, 1), (64 * 16, 1)], kv_heads=1, heads=1))
    check(make_case([(3, 1), (64 * 9, 1)], kv_heads=1, heads=1, head_dim=256), splits=70)  # chunks of 8; most are empty


@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 66, 128, 1000])
def test_windows(window: int) -> None:
    case = make_case([(1, 1), (129, 1), (0, 1), (64, 1), (150, 1), (40, 9)], window=window, heads=2, kv_heads=1)
    check(case, window=window)


@pytest.mark.parametrize("cached", CACHED)
def test_a_window_in_every_type(cached: torch.dtype) -> None:
    check(make_case([(129, 1), (200, 1)], window=70, cached=cached, dtype=torch.bfloat16), window=70)


@pytest.mark.parametrize(("length", "window"), [(65, 66), (127, 66), (128, 66), (129, 66), (130, 66), (193, 129)])
def test_a_window_over_as_many_splits_as_it_can_touch(length: int, window: int) -> None:
    check(make_case([(length, 1)], window=window, heads=2, kv_heads=1), window=window, splits=5)


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("cached", [torch.float32, torch.int8, torch.float8_e5m2])
def test_soft_cap(cached: torch.dtype, soft_cap: float) -> None:
    check(make_case([(40, 1), (70, 1)], cached=cached), soft_cap=soft_cap, scale=1.0)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("cached", [torch.float32, torch.int8])
def test_a_sink_for_each_head(cached: torch.dtype, window: int) -> None:
    case = make_case([(1, 1), (0, 1), (4, 3), (70, 1)], heads=6, window=window, cached=cached)
    got = check(case, window=window, sinks=SINKS)
    assert got[case.rows_of(1)][:, 4].abs().amax(1).min() < 0.1, "the largest sink takes nearly all"
    gone = run(case, case.how(window=window, sinks=torch.full((6,), -1e30)))
    assert torch.equal(gone.nan_to_num(), run(case, case.how(window=window)).nan_to_num())


def test_a_sink_that_is_not_a_number_comes_out() -> None:
    got = run(make_case([(40, 1), (70, 1)], padding=0), Attention(0.25, sinks=torch.tensor([0.0, torch.nan, 0.0, 0.0])))
    assert got[:, 1].isnan().all() and got[:, [0, 2, 3]].isfinite().all()


def test_large_scores_stay_finite() -> None:
    case = make_case([(70, 1), (200, 1)], padding=0)
    case.query.mul_(1000.0)
    got = run(case, case.how())
    assert torch.isfinite(got).all()
    assert (got.double() - case.reference(case.how())[0]).abs().max() < 1e-2  # all weight on one key, or nearly


@pytest.mark.parametrize("cached", [torch.float32, torch.int8])
def test_a_nan_that_is_seen_comes_out_and_stays_in_its_sequence(cached: torch.dtype) -> None:
    case = make_case([(70, 1), (20, 1), (64, 1)], cached=cached, padding=0)
    block = int(case.paging.block_table[0, 1])
    for cache in (case.k_cache, case.v_cache):
        cache.view(torch.uint8)[block] = 255
    got = run(case, case.how())
    assert got[0].isnan().all()
    assert torch.equal(got[1:], run(make_case([(70, 1), (20, 1), (64, 1)], cached=cached, padding=0), case.how())[1:])


def test_agrees_with_the_reference_of_the_backend() -> None:
    case = make_case([(37, 1), (100, 1)], padding=0, head_dim=64)
    keys, values = (by_position(cache, "by_head_rows", keys=False) for cache in (case.k_cache, case.v_cache))
    want = paged_attention(case.query, keys, values, case.paging, 0.25, 30, 20.0, SINKS[:4])
    got = run(case, Attention(0.25, 30, 20.0, SINKS[:4]))
    assert (got - want).abs().max() < 2e-6


@pytest.mark.parametrize("cached", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [0, 70])
def test_bits_do_not_depend_on_neighbours_or_the_size_of_scratch(cached: torch.dtype, window: int) -> None:
    dtype = torch.bfloat16 if cached == torch.bfloat16 else torch.float32
    lengths = [(64, 1), (100, 7), (150, 1), (0, 1), (33, 1)]
    case = make_case(lengths, window=window, dtype=dtype, cached=cached, padding=0)
    how = case.how(window=window, sinks=SINKS[:4])
    batch = run(case, how)
    starts = case.paging.query_start.tolist()
    for s in (0, 2, 4):
        alone = run(case.alone(s), how, splits=9)
        assert torch.equal(alone[0], batch[starts[s]]), s


def test_rows_may_be_apart_and_neither_end_need_be_aligned() -> None:
    case = make_case([(37, 1), (100, 1)], padding=0)
    qkv, wide = torch.full((2, 9, 16), float("nan")), torch.full((2, 7, 16), float("nan"))
    qkv[:, 1:5] = case.query
    scratch = poisoned_scratch(case, 2, 64)
    decode_attention(qkv[:, 1:5], case.k_cache, case.v_cache, case.paging, wide[:, 2:6], case.how(), scratch)
    assert torch.equal(wide[:, 2:6], run(case, case.how()))
    assert wide[:, [0, 1, 6]].isnan().all()


def test_no_sequences() -> None:
    case = make_case([(37, 1)])
    none = Paging(case.paging.block_table[:0], torch.zeros(1, dtype=torch.int32), case.paging.kv_len[:0])
    assert run(replace(case, paging=none), case.how()).isnan().all()


def test_a_split_that_fits_no_tile_is_refused() -> None:
    case = make_case([(37, 1)])
    with pytest.raises(ValueError, match="multiple of 64"):
        run(case, case.how(), split=48)


def test_the_interpreter_sees_what_lies_outside() -> None:
    case = make_case([(100, 1)])
    table = case.paging.block_table.clone()
    table[0, 3] = NOBODY
    with pytest.raises(Exception, match="outside of every tensor") as caught:
        run(replace(case, paging=replace(case.paging, block_table=table)), case.how())
    root: BaseException = caught.value
    while root.__cause__ is not None:
        root = root.__cause__
    assert isinstance(root, KernelFaultError)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities that are meant
@pytest.mark.parametrize("length", [40, 150])
def test_keys_of_no_weight_at_all_give_0_as_in_the_reference(length: int) -> None:
    """Every score is minus infinity, in one split and in several."""
    case = make_case([(length, 1)], padding=0)
    case.k_cache.abs_()
    case.query[..., 0] = float("-inf")
    assert (run(case, case.how()) == 0).all()
    flat = [
        by_position(cache, "by_head_rows", keys=keys) for cache, keys in ((case.k_cache, True), (case.v_cache, False))
    ]
    assert (paged_attention(case.query, *flat, case.paging, 0.25) == 0).all()
