"""Layers with a window hold what a sequence sees and no more, and a prefix is found as long as that is there.

The scripted runner reads back at each step what each kind of layer sees; blocks that nobody may read are overwritten.
"""

from __future__ import annotations

import pytest

from headrace.engine.block_pool import BlockPool
from headrace.engine.make_blocks import make_blocks
from headrace.engine.prefix_cache import HOLE, PrefixCache
from headrace.engine.types import EngineConfig
from headrace.engine.window_blocks import blocks_spanned
from tests.support.driver import Driver, driver
from tests.support.scripted import ScriptedRunner

SIZE, WINDOW = 4, 9
SEEN = 3  # blocks that nine positions may lie in
EVERY_LAYER = pytest.mark.parametrize("num_blocks", [0, 200], ids=["every layer", "some layers"])


def windowed(num_blocks: int, num_window_blocks: int = 24, **fields: object) -> Driver:
    """A driver on a model with windows; with `num_blocks` 0 every layer has one."""
    given = {"window": WINDOW, "num_window_blocks": num_window_blocks, "max_model_len": 500, **fields}
    return driver(num_blocks, SIZE, **given)  # type: ignore[arg-type]


def held(drive: Driver) -> int:
    pool = drive.engine._blocks.pools[1]
    return pool.num_blocks - pool.num_free


def cached(drive: Driver, request_id: str) -> int:
    return drive.outputs[request_id, 0][0].cached_tokens


def test_how_many_blocks_some_positions_lie_in_at_most() -> None:
    for size in (1, 2, 4, 16):
        for count in range(1, 50):
            starts = range(size)
            most = max((start + count - 1) // size + 1 for start in starts)
            assert blocks_spanned(count, size) == most


@EVERY_LAYER
@pytest.mark.parametrize("caching", [True, False])
def test_a_long_answer_holds_a_bounded_number_of_window_blocks(num_blocks: int, caching: bool) -> None:
    drive = windowed(num_blocks, caching=caching, max_num_batched_tokens=8)
    drive.add("a", 70, max_tokens=150, ignore_eos=True)
    prefilling, decoding = 0, list[int]()
    while drive.engine.has_work:
        drive.step()
        if len(drive.tokens.get(("a", 0), ())) < 2:
            prefilling = max(prefilling, held(drive))
        else:
            decoding.append(held(drive))
    assert prefilling <= blocks_spanned(WINDOW - 1 + 8, SIZE)
    assert max(decoding) == SEEN
    assert min(decoding[:-1]) == SEEN - 1
    drive.assert_as_alone()
    drive.assert_idle()


@EVERY_LAYER
def test_a_prefix_is_found_after_blocks_that_nobody_sees_any_more_were_used_again(num_blocks: int) -> None:
    drive = windowed(num_blocks)
    drive.add("a", 41, max_tokens=2)  # ten full blocks
    drive.run()
    lost = drive.engine._blocks.pools[1].allocate(20)  # 24, of which the last see what comes after the prompt
    drive.engine._blocks.pools[1].release(lost, 0)
    cache = drive.engine._blocks.cache
    assert cache is not None
    there = [entry.window_id != HOLE for entry in cache.match([index % 200 for index in range(41)], 10, "")]
    assert there == [*[False] * 6, *[True] * 4]
    drive.add("b", 41, max_tokens=30, ignore_eos=True)
    drive.step()
    assert drive.plan() == {("b", 0): (40, 1)}
    assert drive.sequence("b").window_ids[:8] == [HOLE] * 8
    drive.run()
    drive.assert_as_alone()


@EVERY_LAYER
def test_a_prefix_of_which_a_block_that_is_seen_was_used_again_is_not_found(num_blocks: int) -> None:
    drive = windowed(num_blocks)
    drive.add("a", 41, max_tokens=2)
    drive.run()
    pool = drive.engine._blocks.pools[1]
    pool.release(pool.allocate(23), 0)  # all but the last of the prompt, of which the next token sees two
    drive.add("b", 41, max_tokens=2)
    drive.run()
    assert cached(drive, "b") == 0
    drive.add("c", 41, max_tokens=2)  # what was computed again is there again
    drive.run()
    assert cached(drive, "c") == 40
    drive.assert_as_alone()
    assert drive.engine.stats().prefix_hits == 40


@EVERY_LAYER
def test_the_longest_part_is_found_of_which_the_next_token_sees_all(num_blocks: int) -> None:
    drive = windowed(num_blocks, num_window_blocks=40)
    drive.add("a", 41, max_tokens=2)
    drive.run()
    blocks, prompt = drive.engine._blocks, [index % 200 for index in range(41)]
    assert blocks.cache is not None
    entries = blocks.cache.match(prompt, 10, "")
    blocks.pools[1].lose(entries[8].window_id)
    blocks.cache.detach(entries[8].window_id)
    drive.engine.check()
    drive.add("b", 41, max_tokens=5, ignore_eos=True)
    drive.step()
    assert drive.plan() == {("b", 0): (32, 9)}  # block 9 too, though only 8 was lost
    drive.run()
    drive.assert_as_alone()


def test_a_prefix_shorter_than_the_window_needs_all_of_it() -> None:
    drive = windowed(0, window=60, num_window_blocks=40)
    drive.add("a", 41, max_tokens=2)
    drive.run()
    blocks = drive.engine._blocks
    assert blocks.cache is not None
    first = blocks.cache.match([index % 200 for index in range(41)], 10, "")[0]
    blocks.pools[1].lose(first.window_id)
    blocks.cache.detach(first.window_id)
    drive.add("b", 41, max_tokens=2)
    drive.run()
    assert cached(drive, "b") == 0


def test_a_window_block_of_a_prefix_that_fell_from_the_cache_is_blank() -> None:
    drive = windowed(20, num_window_blocks=40)
    drive.add("a", 41, max_tokens=2)
    drive.run()
    full, window = drive.engine._blocks.pools
    assert (full.num_findable, window.num_findable) == (10, 10)
    full.release(full.allocate(20), 0)
    drive.engine.check()
    assert (full.num_findable, window.num_findable, len(window.blank_block_ids())) == (0, 0, 40)


def test_a_salt_keeps_window_blocks_apart_too() -> None:
    drive = windowed(0, num_window_blocks=60)
    for name, salt in (("a", "X"), ("b", "Y"), ("c", "X")):
        drive.add(name, 41, max_tokens=2, cache_salt=salt)
        drive.run()
    assert [cached(drive, name) for name in "abc"] == [0, 0, 40]


@EVERY_LAYER
def test_two_that_compute_the_same_content_in_one_step_end_up_with_one_block(num_blocks: int) -> None:
    drive = windowed(num_blocks, window=100, script=[7] * 50)
    drive.add("a", 9)
    drive.add("b", 9)
    drive.step()
    assert drive.plan() == {("a", 0): (0, 9), ("b", 0): (0, 9)}
    assert drive.sequence("a").window_ids[:2] == drive.sequence("b").window_ids[:2]
    assert held(drive) == 4
    drive.run()
    drive.assert_as_alone()


def test_a_choice_whose_window_the_first_one_never_had_computes_it() -> None:
    """The first goes on far beyond the prompt with what the cache has, and holds no window block of the prompt."""
    drive = windowed(200, num_window_blocks=60)
    first = drive.add("a", 9, max_tokens=60, ignore_eos=True)
    drive.run()
    settled = (tuple(drive.tokens["a", 0][:50]), tuple(drive.tokens["a", 0][:3]))
    drive.add("b", list(first.prompt_token_ids), max_tokens=60, n=2, ignore_eos=True, settled=settled)
    drive.step()
    assert drive.plan() == {("b", 0): (56, 3)}
    assert HOLE in drive.sequence("b", 0).window_ids[:3]
    drive.run()
    drive.assert_as_alone()
    drive.assert_idle()


@EVERY_LAYER
def test_a_shared_last_block_is_copied_in_both_kinds_of_layers(num_blocks: int) -> None:
    drive = windowed(num_blocks, caching=False)
    drive.add("a", [11, 12, 13, 14, 15, 16], n=3, temperature=1, max_tokens=30, ignore_eos=True)
    drive.step()
    tables = [drive.sequence("a", choice).window_ids for choice in range(3)]
    assert tables == [[0, 1]] * 3
    plan = drive.engine._scheduler.plan()
    assert (plan.copies, plan.window_copies) == (((1, 2), (1, 3)),) * 2
    drive.engine.check()
    drive.engine._scheduler.cancel(plan.step)
    assert [drive.sequence("a", choice).window_ids for choice in range(3)] == [[0, 1]] * 3
    drive.run()
    assert len({tuple(drive.tokens["a", choice]) for choice in range(3)}) == 3
    drive.assert_as_alone()
    drive.assert_idle()


def test_a_chunk_becomes_shorter_before_anybody_gives_way() -> None:
    drive = windowed(200, num_window_blocks=12, max_num_batched_tokens=64)
    drive.add("short", 5, max_tokens=40, ignore_eos=True)
    drive.step()
    drive.add("long", 150, max_tokens=3)
    chunks: list[int] = []
    while drive.engine.has_work:
        drive.step()
        chunks += [count for (name, _), (_, count) in drive.plan().items() if name == "long"]
    assert max(chunks) <= 48
    assert len(chunks) < 20
    assert drive.engine.stats().preemptions == 0
    drive.assert_as_alone()


@EVERY_LAYER
@pytest.mark.parametrize("caching", [True, False])
def test_out_of_window_blocks_the_newest_give_way_and_all_come_to_their_end(num_blocks: int, caching: bool) -> None:
    drive = windowed(num_blocks, num_window_blocks=9, max_num_batched_tokens=16, caching=caching)
    for number in range(8):
        drive.add(f"r{number}", [number + 1] * 3, max_tokens=50, ignore_eos=True)
    drive.run()
    assert drive.engine.stats().preemptions > 0
    drive.assert_as_alone()
    drive.assert_idle()


def test_what_can_never_fit_is_refused() -> None:
    few = windowed(0, num_window_blocks=2)  # nine positions may need three
    assert few.engine._limits.num_blocks == 2
    enough = windowed(0, num_window_blocks=3, max_model_len=1000)
    assert enough.engine._limits.num_blocks * SIZE >= 1000
    assert windowed(50, num_window_blocks=2).engine._limits.num_blocks == 2
    assert windowed(50, num_window_blocks=3).engine._limits.num_blocks == 50


def test_places_of_prefixes_are_as_many_as_can_be_in_use_and_no_more() -> None:
    def names(num_window_blocks: int, max_num_seqs: int) -> int:
        runner = ScriptedRunner(
            num_blocks=0, num_window_blocks=num_window_blocks, window=WINDOW, block_size=SIZE, max_model_len=400
        )
        return make_blocks(runner, EngineConfig(max_num_seqs=max_num_seqs), 400, None).pool.num_blocks

    assert names(1000, 2) == 2 * 100
    assert names(8, 1000) == 8 * 34  # three window blocks have up to 34 times three places before them


def test_stats_are_those_of_blocks_that_take_memory() -> None:
    drive = windowed(0, num_window_blocks=24)
    drive.add("a", 9, max_tokens=60, ignore_eos=True)
    drive.step()
    stats = drive.engine.stats()
    assert (stats.total_blocks, stats.free_blocks, stats.cached_blocks) == (24, 21, 2)


def test_the_judge_sees_a_window_block_that_was_let_go_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.engine.window_blocks import WindowBlocks
    from tests.support.scripted import PagingError

    honest = WindowBlocks.out_of_reach
    monkeypatch.setattr(WindowBlocks, "out_of_reach", lambda self, computed: honest(self, computed + SIZE))
    drive = windowed(0)
    drive.add("a", 30, max_tokens=30, ignore_eos=True)
    with pytest.raises(PagingError, match="let go"):
        drive.run()


def test_check_sees_a_window_block_that_no_entry_has() -> None:
    cache, pool = PrefixCache(2), BlockPool(4, lambda _: None)
    (first,) = pool.allocate(1)
    entry = cache.insert(None, [1, 2], 0, first, "")
    cache.check(lambda _: True)
    cache.attach(entry, 3)
    cache.check(lambda _: True, lambda _: True)
    with pytest.raises(RuntimeError, match="window blocks"):
        cache.check(lambda _: True, lambda _: False)
    entry.window_id = HOLE
    with pytest.raises(RuntimeError, match="window blocks"):
        cache.check(lambda _: True, lambda _: True)
