"""The block pool as a specification: which ids, which counts, in which order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.engine.block_pool import BlockPool


class Forgotten(list[int]):
    """Records the kept blocks that were given away."""


def make(num_blocks: int) -> tuple[BlockPool, Forgotten]:
    forgotten = Forgotten()
    return BlockPool(num_blocks, forgotten.append), forgotten


def test_a_fresh_pool_gives_ascending_ids_with_one_reference_each() -> None:
    pool, _ = make(5)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.refs == [1, 1, 1, 0, 0]
    assert pool.num_free == 2
    assert pool.reuse_order() == (3, 4)


def test_blocks_released_tail_first_come_back_in_table_order() -> None:
    pool, _ = make(5)
    table = pool.allocate(3)
    pool.release(reversed(table), 0)
    assert pool.reuse_order() == (0, 1, 2, 3, 4)
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_kept_blocks_fall_last_and_the_least_recently_freed_first() -> None:
    pool, forgotten = make(6)
    first, second = pool.allocate(2), pool.allocate(2)
    for block_id in (*first, *second):
        pool.keep(block_id)
    pool.release(reversed(second), 0)
    pool.release(reversed(first), 0)
    assert pool.reuse_order() == (4, 5, 3, 2, 1, 0)  # blank ones, then tails before heads, older before younger
    assert pool.allocate(3) == [4, 5, 3]
    assert forgotten == [3]
    assert pool.allocate(2) == [2, 1]
    assert forgotten == [3, 2, 1]
    assert not pool.is_findable(3)
    assert pool.is_findable(0)


def test_a_kept_block_that_is_shared_again_is_no_longer_free_and_later_the_youngest() -> None:
    pool, forgotten = make(3)
    for block_id in pool.allocate(2):
        pool.keep(block_id)
    pool.release((1, 0), 0)
    assert pool.reuse_order() == (2, 1, 0)
    pool.share(1)
    assert (pool.refs, pool.num_free, pool.reuse_order()) == ([0, 1, 0], 2, (2, 0))
    pool.release((1,), 0)
    assert pool.reuse_order() == (2, 0, 1)
    assert forgotten == []


def test_a_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool, _ = make(2)
    (block_id,) = pool.allocate(1)
    pool.share(block_id)
    pool.release((block_id,), 0)
    assert (pool.refs[block_id], pool.num_free) == (1, 1)
    pool.release((block_id,), 0)
    assert (pool.refs[block_id], pool.num_free) == (0, 2)


def test_blocks_of_a_sequence_that_ended_are_not_given_away_while_a_step_in_flight_may_write_them() -> None:
    """A place of a finished request was given to the next one while the step under way still used it."""
    pool, _ = make(4)
    table = pool.allocate(4)
    pool.retire(6)
    pool.release((table[3], table[2]), 8)
    pool.release((table[1],), 7)
    pool.release((table[0],), 6)  # step 6 is over: at once
    assert (pool.num_free, pool.num_pending) == (1, 3)
    pool.retire(7)
    assert (pool.num_free, pool.num_pending) == (2, 2)
    assert pool.refs == [0, 0, 1, 1]
    pool.check({})
    pool.retire(8)
    assert (pool.num_free, pool.num_pending) == (4, 0)
    assert pool.reuse_order() == (2, 3, 1, 0)


def test_retiring_a_later_step_retires_the_earlier_ones() -> None:
    pool, _ = make(2)
    pool.allocate(2)
    pool.release((1,), 3)
    pool.release((0,), 4)
    pool.retire(5)
    assert pool.reuse_order() == (0, 1)
    pool.retire(4)  # an old step changes nothing
    pool.allocate(1)
    pool.release((0,), 5)
    assert pool.num_free == 2


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool, _ = make(3)
    with pytest.raises(RuntimeError, match="4 blocks wanted, 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_releasing_more_often_than_held_is_refused() -> None:
    pool, _ = make(3)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="block 2 is released more often"):
        pool.release((2,), 0)


def test_only_blank_blocks_may_be_overwritten_by_anyone() -> None:
    pool, _ = make(4)
    pool.allocate(3)
    pool.keep(0)
    pool.release((1, 0), 0)
    assert pool.blank_block_ids() == {1, 3}


def _break_count(pool: BlockPool) -> None:
    pool.refs[0] += 1


def _break_free_list(pool: BlockPool) -> None:
    pool._blank.append(0)


def _break_loss(pool: BlockPool) -> None:
    pool._blank.remove(3)


def _break_findable(pool: BlockPool) -> None:
    pool._findable.add(3)


def _break_kept(pool: BlockPool) -> None:
    pool._findable.discard(2)


@pytest.mark.parametrize("damage", [_break_count, _break_free_list, _break_loss, _break_findable, _break_kept])
def test_check_sees_every_kind_of_wrong_books(damage: Callable[[BlockPool], None]) -> None:
    pool, _ = make(4)
    pool.allocate(3)
    pool.keep(2)
    pool.release((2,), 0)
    pool.check({0: 1, 1: 1})
    damage(pool)
    with pytest.raises(RuntimeError):
        pool.check({0: 1, 1: 1})


@pytest.mark.parametrize("claims", [{0: 1}, {0: 1, 1: 2}, {0: 1, 1: 1, 3: 1}])
def test_check_compares_counts_with_what_holders_claim(claims: dict[int, int]) -> None:
    pool, _ = make(4)
    pool.allocate(2)
    with pytest.raises(RuntimeError, match="references, its holders claim"):
        pool.check(claims)
