"""Sequences that share blocks: the same bits as without, from fewer reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from headrace.kernels.attention import SharedPrefix
from headrace.kernels.gpu.decode import decode_attention
from headrace.kernels.gpu.shared_prefix import shared_prefix_parts
from tests.support.paged_cases import CACHED, NOBODY, Case, make_case, poisoned_scratch, shared_prefix

SPLIT = 64


def run(case: Case, **options: object) -> torch.Tensor:
    out, how = case.empty_out(), case.how(**options)
    scratch = poisoned_scratch(case, max(-(-keys // SPLIT) for keys, _ in case.lengths), SPLIT)
    decode_attention(case.query, case.k_cache, case.v_cache, case.paging, out, how, scratch)
    return out


def check(case: Case, tiles: Sequence[tuple[Sequence[int], int]], per_tile: int, **options: object) -> None:
    """Right, the same bits as without tiles, and no block of a tile read but its first sequence's."""
    shared = shared_prefix(case, tiles, per_tile)
    table = case.paging.block_table.clone()
    block_size = case.k_cache.shape[1]
    for sequences, positions in tiles:
        table[list(sequences[1:]), : positions // block_size] = NOBODY
    shared = replace(shared, paging=replace(shared.paging, block_table=table))
    got = run(shared, **options)
    case.check(got, case.how(**options), case.rows_of(1))
    assert torch.equal(got.nan_to_num(), run(case, **options).nan_to_num())


@pytest.mark.parametrize(
    ("dtype", "cached"), [*((torch.bfloat16, cached) for cached in CACHED), (torch.float32, torch.float32)]
)
def test_two_groups_among_others(dtype: torch.dtype, cached: torch.dtype) -> None:
    # 64 positions of sequences 1 and 4, 128 of 2, 6 and 3; 0 has none, 5 has two queries, 7 no keys any more
    lengths = [(70, 1), (65, 1), (200, 1), (129, 1), (100, 1), (90, 2), (150, 1), (0, 1)]
    tiles = [((4, 1), 64), ((2, 6, 3), 128)]
    case = make_case(lengths, prefixes=tiles, dtype=dtype, cached=cached, heads=2, kv_heads=1)
    check(case, tiles, 3)


def test_unequal_prefixes_of_0_1_and_20_blocks_beside_an_exhausted_sequence() -> None:
    # blocks of 64: 20 of them are 1280 positions
    lengths = [(100, 1), (65, 1), (1281, 1), (0, 1), (80, 1), (1320, 1), (33, 1)]
    tiles = [((1, 4), 64), ((2, 5), 1280)]
    case = make_case(lengths, prefixes=tiles, block_size=64, heads=1, kv_heads=1)
    check(case, tiles, 4)


def test_an_exhausted_sequence_in_a_tile_is_passed_over() -> None:
    case = make_case([(100, 1), (0, 1), (80, 2), (90, 1)], prefixes=[((0, 3), 64)])
    shared = shared_prefix(case, [((0, 1, 2, 3), 64)], per_tile=4)
    got = run(shared)
    case.check(got, case.how(), case.rows_of(1))
    assert torch.equal(got.nan_to_num(), run(case).nan_to_num())


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (7, 1), (8, 2), (48, 1)])
def test_queries_of_a_tile_beyond_what_a_program_takes(heads: int, kv_heads: int) -> None:
    tiles = [((2, 0, 1), 64)]
    check(make_case([(65 + 3 * s, 1) for s in range(3)], prefixes=tiles, heads=heads, kv_heads=kv_heads), tiles, 5)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.int8])
def test_head_sizes(cached: torch.dtype, head_dim: int) -> None:
    tiles = [((1, 0), 64)]
    case = make_case([(70, 1), (80, 1)], prefixes=tiles, head_dim=head_dim, dtype=torch.bfloat16, cached=cached)
    check(case, tiles, 9)  # 18 queries of a head: one program, at every head size


@pytest.mark.parametrize("options", [{"soft_cap": 5.0}, {"sinks": torch.tensor([0.5, -1.0, 9.0, 1.0])}])
def test_soft_cap_and_sinks(options: dict[str, object]) -> None:
    tiles = [((1, 0), 128)]
    check(make_case([(150, 1), (129, 1)], prefixes=tiles), tiles, 2, **options)


def test_several_tiles_of_one_prefix() -> None:
    tiles = [((0, 1), 64), ((4, 3), 64), ((2,), 64)]
    check(make_case([(70 + s, 1) for s in range(5)], prefixes=[((0, 1, 2, 3, 4), 64)]), tiles, 2)


def test_a_layer_with_a_window_takes_no_notice() -> None:
    tiles = [((1, 0), 64)]
    case = make_case([(150, 1), (129, 1)], prefixes=tiles)
    got = run(shared_prefix(case, tiles, 2), window=100)
    case.check(got, case.how(window=100), case.rows_of(1))


def test_no_tiles() -> None:
    case = make_case([(150, 1), (7, 1)])
    none = SharedPrefix(*(torch.zeros(shape, dtype=torch.int32) for shape in ((0, 4), (0,), (2,))))
    got = run(replace(case, paging=replace(case.paging, shared=none)))
    case.check(got, case.how(), case.rows_of(1))


def test_parts_go_where_the_plain_kernel_puts_them_and_nowhere_else() -> None:
    tiles = [((2, 0), 128)]
    case = make_case([(150, 1), (140, 1), (200, 1)], prefixes=tiles)
    plain, shared = (poisoned_scratch(case, 4, SPLIT) for _ in range(2))
    decode_attention(case.query, case.k_cache, case.v_cache, case.paging, case.empty_out(), case.how(), plain)
    with_tiles = shared_prefix(case, tiles, 2).paging
    shared_prefix_parts(case.query, case.k_cache, case.v_cache, with_tiles, case.how(), shared)
    for got, want in ((shared.parts, plain.parts), (shared.lse, plain.lse)):
        assert torch.equal(got[[0, 2], :, :2], want[[0, 2], :, :2])
        assert got[1].isnan().all() and got[:, :, 2:].isnan().all() and got[3:].isnan().all()


def test_tiles_of_another_step_in_the_same_tensors() -> None:
    """What a graph replays: the same launches, over tensors that have changed."""
    tiles = [((0, 1), 64)]
    case = make_case([(70, 1), (80, 1), (90, 1), (150, 1)], prefixes=[((0, 1), 64), ((3, 2), 64)], padding=0)
    shared = shared_prefix(case, tiles, 2)
    want = run(shared)
    assert shared.paging.shared is not None
    for tensor, now in zip(
        (shared.paging.shared.seqs, shared.paging.shared.tile_len, shared.paging.shared.own_from),
        ([[-1, -1], [3, 2]], [0, 64], [0, 0, 64, 64]),
        strict=True,
    ):
        tensor.copy_(torch.tensor(now))
    assert torch.equal(run(shared), want)
