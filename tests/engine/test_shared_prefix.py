"""Which sequences are read for together: only such as run on the same blocks, and in the way that saves the most."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from headrace.engine.sequence import Sequence
from headrace.engine.shared_prefix import PrefixGroups, Sharing, sharing_of
from headrace.engine.types import SamplingOptions, ScheduledRow
from headrace.kernels.attention import SharedPrefix
from tests.support.torch_rig import backend

CPU = torch.device("cpu")
Splits = list[tuple[int, ...]]


def tiles(*members: Splits) -> list[tuple[tuple[int, ...], int]]:
    """Who is read for together, and how many splits, of sequences with these splits of two blocks of a position."""
    groups = PrefixGroups(Sharing(split=2, per_tile=100), 1, CPU)
    rows = [row([*(block for split in each for block in split), 0], 2 * len(each) + 1) for each in members]
    shared = groups.find(rows)
    if shared is None:
        return []
    pairs = zip(shared.seqs.tolist(), shared.tile_len.tolist(), strict=True)
    return sorted((tuple(n for n in numbers if n >= 0), length // 2) for numbers, length in pairs)


A, B, C, D = (1, 2), (3, 4), (5, 6), (7, 8)


def test_what_all_share_is_one_tile() -> None:
    assert tiles([A, B], [A, B], [A, B, C]) == [((0, 1, 2), 2)]


def test_other_prefixes_are_other_tiles_and_loners_none() -> None:
    assert tiles([A], [B, C], [A], [B, C], [D], []) == [((0, 2), 1), ((1, 3), 2)]
    assert tiles([A], [B]) == []
    assert tiles() == []


def test_the_same_blocks_later_on_are_not_the_same_prefix() -> None:
    """Block ids after a difference say nothing: what was computed there may have other bits."""
    assert tiles([A, C], [B, C]) == []


def test_a_tree_is_cut_where_it_saves_the_most() -> None:
    long = [B, C, D]
    assert tiles([A, *long], [A, *long], [A, D]) == [((0, 1), 4)], "3 more splits for two are worth more than 1 for all"
    assert tiles([A, B], [A, B], [A, C], [A, D]) == [((0, 1, 2, 3), 1)]


def partitions(numbers: list[int]) -> Iterator[list[list[int]]]:
    if not numbers:
        yield []
        return
    first, rest = numbers[0], numbers[1:]
    for parts in partitions(rest):
        yield [[first], *parts]
        for at in range(len(parts)):
            yield [*parts[:at], [first, *parts[at]], *parts[at + 1 :]]


def common(members: list[Splits]) -> int:
    depth = 0
    while all(len(each) > depth for each in members) and len({each[depth] for each in members}) == 1:
        depth += 1
    return depth


@pytest.mark.parametrize("seed", range(60))
def test_no_other_way_saves_more(seed: int) -> None:
    draw = random.Random(seed)
    members: list[Splits] = [
        [(draw.randrange(2), 7) for _ in range(draw.randrange(6))] for _ in range(draw.randrange(2, 7))
    ]
    got = tiles(*members)
    for numbers, depth in got:
        assert len(numbers) > 1
        assert 0 < depth <= common([members[number] for number in numbers])
    together = [number for numbers, _ in got for number in numbers]
    assert len(together) == len(set(together))
    best = max(
        sum((len(part) - 1) * common([members[number] for number in part]) for part in parts)
        for parts in partitions(list(range(len(members))))
    )
    assert sum((len(numbers) - 1) * depth for numbers, depth in got) == best


def row(block_ids: list[int], length: int, num_tokens: int = 1) -> ScheduledRow:
    """A sequence of `length` tokens of which the last `num_tokens` are computed."""
    sequence = Sequence(
        request_id="r", choice=0, options=SamplingOptions(), salt="", priority=0, arrival=0,
        token_ids=list(range(2, 2 + length)), num_prompt_tokens=length, num_settled=0, stop_ids=frozenset(),
        max_len=100, min_stop_len=0, only_best=False, block_ids=block_ids,
    )  # fmt: skip
    return ScheduledRow(sequence, length - num_tokens, num_tokens, samples=True)


def found(groups: PrefixGroups, *rows: ScheduledRow) -> SharedPrefix:
    shared = groups.find(rows)
    assert shared is not None
    return shared


def test_tensors_for_the_kernel() -> None:
    """Splits of two blocks of four positions; 2 computes a chunk, and 3 has its last position in the second split."""
    groups = PrefixGroups(Sharing(split=8, per_tile=4), 4, CPU)
    rows = [
        row([1, 2, 3, 4, 9], 17),
        row([1, 2, 3, 4, 8], 18),
        row([1, 2, 3, 4, 5], 17, 4),
        row([1, 2, 3, 4], 16),
        row([6, 7], 8),
    ]
    shared = found(groups, *rows)
    assert shared.seqs.tolist() == [[0, 1, -1, -1]], "3's second split is not whole before its last position"
    assert shared.tile_len.tolist() == [16]
    assert shared.own_from.tolist() == [16, 16, 0, 0, 0]
    assert {shared.seqs.dtype, shared.tile_len.dtype, shared.own_from.dtype} == {torch.int32}
    assert (shared.own_from < torch.tensor([17, 18, 17, 16, 8])).all(), "a key at least is left to each"


def test_a_tile_holds_so_many_and_one_left_over_reads_for_itself() -> None:
    groups = PrefixGroups(Sharing(split=8, per_tile=3), 4, CPU)
    shared = found(groups, *(row([1, 2, 10 + n], 9) for n in range(7)))
    assert shared.seqs.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert shared.own_from.tolist() == [8] * 6 + [0]


def test_nothing_is_found_anew_until_something_changes() -> None:
    groups = PrefixGroups(Sharing(split=8, per_tile=4), 4, CPU)
    rows = [row([1, 2, 30 + n], 9) for n in range(3)]
    first = groups.find(rows)
    longer = [each._replace(start=each.start + 1) for each in rows]
    assert groups.find(longer) is first
    assert groups.find([each._replace(start=16) for each in rows]) is not first
    assert groups.find(rows[:1]) is None
    again = found(groups, *rows)
    rows[0].sequence.block_ids[0] = 99  # it was preempted, and came back on other blocks
    rows[0].sequence.epoch += 1
    assert found(groups, *rows).seqs.tolist() == [[1, 2, -1, -1]]
    assert again.seqs.tolist() == [[0, 1, 2, -1]]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_remembered_gives_what_is_found_anew(seed: int) -> None:
    """Sequences come, grow, part and go in any order; whoever has seen it all says the same as whoever has not."""
    draw = random.Random(seed)
    groups, rows = PrefixGroups(Sharing(split=2, per_tile=100), 1, CPU), list[ScheduledRow]()
    for _ in range(40):
        change = draw.random()
        if change < 0.4 or not rows:
            rows.insert(
                draw.randrange(len(rows) + 1), row([draw.randrange(2) for _ in range(12)], draw.randrange(1, 12))
            )
        elif change < 0.6:
            rows.pop(draw.randrange(len(rows)))
        elif change < 0.7:
            other = draw.choice(rows).sequence
            other.block_ids[:] = [draw.randrange(2) for _ in range(12)]
            other.epoch += 1
        at = draw.randrange(len(rows)) if rows else 0
        rows[at : at + 1] = [each._replace(start=min(each.start + 1, 11)) for each in rows[at : at + 1]]
        got, anew = groups.find(rows), PrefixGroups(Sharing(split=2, per_tile=100), 1, CPU).find(rows)
        assert (got is None) == (anew is None)
        if got is not None and anew is not None:
            assert got.own_from.tolist() == anew.own_from.tolist()
            assert sorted(got.seqs.tolist()) == sorted(anew.seqs.tolist())
    groups.find([])
    assert not groups._paths and not groups._root.children, "nothing is kept of those who are gone"  # pyright: ignore[reportPrivateUsage]


def test_splits_are_whole_blocks() -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        PrefixGroups(Sharing(split=8, per_tile=4), 3, CPU)


def test_blocks_that_do_not_make_up_a_split_are_not_shared() -> None:
    """--block-size may be any number: with one that does not divide a split, an engine loads and shares nothing."""

    def sharing(positions: int, queries: int) -> tuple[int, int]:
        del positions
        return 256, 64 // queries

    ops = replace(backend("torch"), sharing=sharing)
    assert sharing_of(ops, 512, 16, 2) == Sharing(split=256, per_tile=32)
    assert sharing_of(ops, 516, 12, 2) is None
    assert sharing_of(ops, 1024, 512, 2) is None
    assert sharing_of(ops, 256, 16, 2) is None
    assert sharing_of(ops, 512, 16, 64) is None
