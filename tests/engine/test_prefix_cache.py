"""The prefix cache as a specification: what is found, what must never be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.prefix_cache import BlockHash, CachedBlock, PrefixCache, keyed_hash


def constant(_: bytes) -> bytes:
    """The worst hash: everything collides."""
    return b""


def enter(
    cache: PrefixCache, token_ids: list[int], block_ids: list[int], salt: str = "", adapter: str | None = None
) -> list[CachedBlock]:
    """Enter the leading blocks of a prompt, as a sequence would."""
    chain: list[CachedBlock] = []
    for index, block_id in enumerate(block_ids):
        chain.append(cache.insert(chain[-1] if chain else None, token_ids, index, block_id, salt, adapter))
    return chain


def found(
    cache: PrefixCache, token_ids: list[int], salt: str = "", adapter: str | None = None, most: int = 99
) -> list[int]:
    """Block ids of the longest cached prefix."""
    return [entry.block_id for entry in cache.match(token_ids, min(most, len(token_ids) // 2), salt, adapter)]


@pytest.mark.parametrize("block_hash", [None, constant])
def test_the_longest_prefix_of_full_blocks_is_found(block_hash: BlockHash | None) -> None:
    cache = PrefixCache(2, block_hash)
    enter(cache, [1, 2, 3, 4, 5], [10, 11])
    assert found(cache, [1, 2, 3, 4, 5, 6]) == [10, 11]
    assert found(cache, [1, 2, 3, 9]) == [10]
    assert found(cache, [1, 2, 3, 4, 5, 6], most=1) == [10]
    assert found(cache, [1]) == []
    assert found(cache, [9, 2, 3, 4]) == []
    assert len(cache) == 2


@pytest.mark.parametrize("block_hash", [None, constant])
def test_equal_blocks_after_different_beginnings_are_different(block_hash: BlockHash | None) -> None:
    """Keys and values of a token depend on all before it: the parent must be the very entry, not only its hash."""
    cache = PrefixCache(2, block_hash)
    enter(cache, [1, 2, 7, 7, 5, 5], [0, 1, 2])
    enter(cache, [3, 4, 7, 7], [3, 4])
    assert found(cache, [3, 4, 7, 7, 5, 5]) == [3, 4]
    assert found(cache, [7, 7, 5, 5]) == []
    assert found(cache, [1, 2, 7, 7, 7, 7]) == [0, 1]


@pytest.mark.parametrize("block_hash", [None, constant])
def test_a_salt_and_an_adapter_of_the_same_name_never_share(block_hash: BlockHash | None) -> None:
    """A tenant's salt and an adapter that happened to be called the same once led to one key."""
    cache = PrefixCache(2, block_hash)
    enter(cache, [1, 2], [0], salt="X")
    assert found(cache, [1, 2], adapter="X") == []
    assert found(cache, [1, 2], salt="X", adapter="X") == []
    assert found(cache, [1, 2]) == []
    assert found(cache, [1, 2], salt="X") == [0]
    enter(cache, [1, 2], [1], adapter="X")
    assert found(cache, [1, 2], adapter="X") == [1]
    assert found(cache, [1, 2], salt="X") == [0]


def test_every_token_id_counts_whole() -> None:
    cache = PrefixCache(2, constant)
    enter(cache, [1, 258], [0])
    assert found(cache, [257, 2]) == []
    assert found(cache, [1 + 2**16, 258]) == []
    enter(cache, [2**31 - 1, 0], [1])
    assert found(cache, [2**31 - 1, 0]) == [1]


def test_of_two_blocks_with_one_content_the_first_stays() -> None:
    cache = PrefixCache(2)
    (first,) = enter(cache, [1, 2], [0])
    (again,) = enter(cache, [1, 2], [5])
    assert again is first
    assert found(cache, [1, 2]) == [0]
    assert len(cache) == 1


def test_a_forgotten_block_is_found_no_more_and_may_come_again() -> None:
    cache = PrefixCache(2)
    enter(cache, [1, 2, 3, 4], [0, 1])
    cache.forget(1)
    assert found(cache, [1, 2, 3, 4]) == [0]
    enter(cache, [1, 2, 3, 4], [0, 7])
    assert found(cache, [1, 2, 3, 4]) == [0, 7]
    cache.check(lambda _: True)


def test_nothing_is_kept_of_a_salt_without_entries() -> None:
    cache = PrefixCache(2)
    for number in range(100):
        enter(cache, [1, 2], [number], salt=f"tenant {number}")
    for number in range(100):
        cache.forget(number)
    assert (len(cache), len(cache._roots), len(cache._buckets)) == (0, 0, 0)
    cache.check(lambda _: True)


def test_nobody_outside_the_process_can_know_which_blocks_collide() -> None:
    """With a known start value, prompts could be built whose blocks have one hash."""
    first, second = keyed_hash(), keyed_hash()
    assert first(b"data") == first(b"data")
    assert first(b"data") != second(b"data")
    assert len(first(b"data")) == 16


def test_a_salt_may_hold_anything() -> None:
    cache = PrefixCache(1)
    enter(cache, [1], [0], salt="a\ud83d")
    assert found(cache, [1, 1], salt="a\ud83d") == [0]


def test_check_sees_a_block_that_outlives_the_one_before_it() -> None:
    cache = PrefixCache(2)
    enter(cache, [1, 2, 3, 4], [0, 1])
    cache.check(lambda _: True)
    cache.forget(0)
    with pytest.raises(RuntimeError, match="block 1 outlived"):
        cache.check(lambda _: True)


def test_check_sees_an_entry_that_the_pool_does_not_know() -> None:
    cache = PrefixCache(2)
    enter(cache, [1, 2], [0])
    with pytest.raises(RuntimeError, match="block 0 has an entry"):
        cache.check(lambda _: False)


def test_check_sees_an_entry_whose_content_has_changed() -> None:
    cache = PrefixCache(2)
    (entry,) = enter(cache, [1, 2], [0])
    entry.content = b"changed"
    with pytest.raises(RuntimeError, match="cannot be found"):
        cache.check(lambda _: True)


def one_bit(data: bytes) -> bytes:
    """A hash with two values."""
    return bytes([sum(data) & 1])


@pytest.mark.parametrize("block_hash", [None, constant, one_bit])
@given(prompts=st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=8), st.sampled_from(["", "a"])), max_size=12))
def test_whatever_the_hash_it_behaves_as_a_table_of_whole_prefixes(
    block_hash: BlockHash | None, prompts: list[tuple[list[int], str]]
) -> None:
    cache = PrefixCache(2, block_hash)
    table: dict[tuple[str, tuple[int, ...]], int] = {}
    for token_ids, salt in prompts:
        ends = range(2, len(token_ids) + 1, 2)
        known = [table[salt, tuple(token_ids[:end])] for end in ends if (salt, tuple(token_ids[:end])) in table]
        assert found(cache, token_ids, salt) == known
        block_ids = [table.setdefault((salt, tuple(token_ids[:end])), len(table)) for end in ends]
        enter(cache, token_ids, block_ids, salt)
        assert found(cache, token_ids, salt) == block_ids
    cache.check(lambda _: True)
    assert len(cache) == len(table)
