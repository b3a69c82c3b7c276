"""Which blocks a sequence holds: growth, prefix hits, sharing, what the cache may learn."""

from __future__ import annotations

import pytest

from tests.support.driver import Driver, driver
from tests.support.scripted import PagingError

EOS = 257


def refs(drive: Driver, request_id: str, choice: int = 0) -> list[int]:
    """Reference counts of a live choice's blocks."""
    counts = drive.engine._blocks.pool.refs
    return [counts[block_id] for block_id in drive.sequence(request_id, choice).block_ids]


def test_a_block_is_taken_when_the_first_token_goes_into_it() -> None:
    drive = driver(num_blocks=4, block_size=4, script=[7] * 20)
    drive.add("a", 4, max_tokens=6)
    drive.step()
    assert drive.sequence("a").block_ids == [0]
    drive.step()  # computes the token at position 4
    assert drive.sequence("a").block_ids == [0, 1]
    for _ in range(3):
        drive.step()
    assert drive.sequence("a").block_ids == [0, 1]
    assert drive.sequence("a").num_computed_tokens == 8
    drive.step()  # the sixth token ends it; it is never computed and needs no block
    drive.assert_idle()
    assert drive.engine._blocks.pool.reuse_order() == (2, 3, 1, 0)


def test_a_second_prompt_takes_the_cached_blocks_and_computes_the_rest() -> None:
    drive = driver(num_blocks=16, block_size=4, script=[7] * 50)
    drive.add("a", 10)
    drive.step()
    drive.add("b", 10)
    drive.step()
    assert drive.plan() == {("a", 0): (10, 1), ("b", 0): (8, 2)}
    assert drive.sequence("a").block_ids == [0, 1, 2]
    assert drive.sequence("b").block_ids == [0, 1, 3]
    assert refs(drive, "b") == [2, 2, 1]
    assert drive.outputs["b", 0][0].cached_tokens == 8
    assert drive.outputs["a", 0][0].cached_tokens == 0
    assert (drive.engine.stats().prefix_queries, drive.engine.stats().prefix_hits) == (20, 8)


def test_an_admission_takes_the_blocks_of_the_whole_prompt_at_once() -> None:
    drive = driver(num_blocks=16, block_size=4, max_num_batched_tokens=4, script=[7] * 50)
    drive.add("a", 11)
    drive.step()
    assert drive.plan() == {("a", 0): (0, 4)}
    assert drive.sequence("a").block_ids == [0, 1, 2]


def test_at_least_one_token_is_always_left_to_compute() -> None:
    drive = driver(num_blocks=16, block_size=4, script=[7] * 50)
    drive.add("a", 8)
    drive.step()
    drive.add("b", 8)
    drive.step()
    assert drive.plan()["b", 0] == (4, 4)
    drive.add("c", 9)
    drive.step()
    assert drive.plan()["c", 0] == (8, 1)


@pytest.mark.parametrize("rest", range(8))
def test_prompts_that_end_anywhere_in_a_block_are_continued_rightly_after_a_hit(rest: int) -> None:
    """A prefill that had ended a few tokens past a block's edge left a block that poisoned the next hit."""
    drive = driver(num_blocks=32, block_size=8)
    for extra in (0, 1, 0, 2):
        drive.add(f"r{len(drive.requests)}", 16 + rest + extra, max_tokens=10)
        drive.run()
    drive.assert_as_alone()
    assert drive.engine.stats().prefix_hits >= 3 * 8


@pytest.mark.parametrize("caching", [True, False])
def test_the_same_greedy_prompt_gives_the_same_tokens_each_time(caching: bool) -> None:
    """The cache must not change a word."""
    drive = driver(num_blocks=32, caching=caching)
    for number in range(4):
        drive.add(f"r{number}", 13, max_tokens=9)
        drive.run()
    assert len({tuple(drive.tokens[f"r{number}", 0]) for number in range(4)}) == 1
    hits = [drive.outputs[f"r{number}", 0][0].cached_tokens for number in range(4)]
    assert hits == ([0, 12, 12, 12] if caching else [0, 0, 0, 0])
    drive.assert_as_alone()


def test_output_is_found_too_as_the_beginning_of_the_next_turn() -> None:
    drive = driver(num_blocks=32, block_size=4)
    first = drive.add("turn 1", [9] * 5, max_tokens=11, ignore_eos=True)
    drive.run()
    history = [*first.prompt_token_ids, *drive.tokens["turn 1", 0]]
    drive.add("turn 2", [*history, 1, 2], max_tokens=3)
    drive.run()
    assert drive.outputs["turn 2", 0][0].cached_tokens == 12  # of 16, the last was never computed
    drive.assert_as_alone()


def test_two_that_compute_the_same_content_in_one_step_end_up_with_one_block() -> None:
    drive = driver(num_blocks=16, block_size=4, script=[7] * 50)
    drive.add("a", 9)
    drive.add("b", 9)
    epoch = -1
    drive.step()
    assert drive.plan() == {("a", 0): (0, 9), ("b", 0): (0, 9)}
    assert drive.sequence("a").block_ids == [0, 1, 2]
    assert drive.sequence("b").block_ids == [0, 1, 5]
    assert drive.sequence("b").epoch > epoch
    assert refs(drive, "a") == [2, 2, 1]
    assert drive.engine.stats().free_blocks == 12
    drive.run()
    drive.assert_as_alone()


def test_salts_do_not_share() -> None:
    drive = driver(num_blocks=32, script=[7, 7])
    for name, salt in (("a", ""), ("b", "X"), ("c", "Y"), ("d", "X"), ("e", "")):
        drive.add(name, 12, cache_salt=salt)
        drive.run()
    assert [drive.outputs[name, 0][0].cached_tokens for name in "abcde"] == [0, 0, 0, 8, 8]


@pytest.mark.parametrize("block_hash", [None, lambda _: b""])
def test_no_collision_serves_foreign_blocks(block_hash: object) -> None:
    """With a hash that is constant all depends on comparing ids, parents and salts; the runner would see a mix-up."""
    drive = driver(num_blocks=40, block_size=2, block_hash=block_hash)  # type: ignore[arg-type]
    for number in range(24):
        prompt = [number % 2, number % 3, 1, 1, number % 4, 1, 1, 1, 1]
        drive.add(f"r{number}", prompt, max_tokens=4, cache_salt="ab"[number % 2])
        if number % 3:
            drive.step()
    drive.run()
    drive.assert_as_alone()
    assert drive.engine.stats().prefix_hits > 20


def test_three_times_more_prefixes_than_blocks_and_no_answer_holds_a_foreign_word() -> None:
    """Finished strangers' conversations came back from a cache under pressure, reported as not cached."""
    drive = driver(num_blocks=24, block_size=4, max_num_seqs=2, script="echo")
    for number in range(100):
        drive.add(f"r{number}", [*range(8), 100 + number, *range(number % 5)], max_tokens=12)
    drive.run()
    drive.assert_as_alone()
    for number in range(100):
        words = [token for token in drive.tokens[f"r{number}", 0] if 100 <= token < 200]
        assert words == [100 + number]
        served = drive.outputs[f"r{number}", 0][0].cached_tokens
        (start, _) = next(
            (row[2], row[3]) for plan in drive.runner.plans for row in plan if row[:2] == (f"r{number}", 0)
        )
        assert served == start  # what is reported is what was not computed


def test_only_committed_chunks_are_found() -> None:
    drive = driver(num_blocks=64, block_size=4, max_num_batched_tokens=8, script=[7])
    drive.add("a", 40)
    drive.step()
    drive.step()
    drive.engine.abort("a")
    drive.add("b", 40)
    drive.step()
    assert drive.plan() == {("b", 0): (16, 8)}
    drive.run()
    drive.assert_as_alone()


def test_cancels_and_retries_of_one_request_change_no_other() -> None:
    drive = driver(num_blocks=60, block_size=4, max_num_batched_tokens=16)
    for number in range(6):
        drive.add(f"r{number}", [*range(20), number] * 2, max_tokens=15)
    for attempt in range(3):
        drive.step()
        drive.engine.abort("r1" if attempt == 0 else f"r1 again {attempt}")
        drive.add(f"r1 again {attempt + 1}", [*range(20), 1] * 2, max_tokens=15)
    drive.run()
    assert set(drive.finishes) == {(f"r{number}", 0) for number in (0, 2, 3, 4, 5)} | {("r1 again 3", 0)}
    drive.assert_as_alone()
    drive.assert_idle()


def test_a_row_that_is_not_finite_is_never_found_again() -> None:
    drive = driver(num_blocks=32, block_size=4, max_num_batched_tokens=8, nan_token_id=99)
    prompt = [*range(8), 1, 2, 99, 4, 5, 6]
    for name in ("a", "b"):
        drive.add(name, prompt)
        drive.run()
        assert drive.finishes[name, 0].error == "numeric"
    starts = [row[2] for plan in drive.runner.plans for row in plan if row[0] == "b"]
    assert starts == [8]  # the first chunk was finite and is shared; the poisoned one is computed again
    assert drive.engine.stats().cached_blocks == 2


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 1}])
def test_a_chunked_prompt_without_cache_comes_to_its_end(fields: dict[str, int]) -> None:
    """ "Do not enter into the cache" and a prompt longer than a chunk once ran in a circle until memory was gone."""
    drive = driver(num_blocks=16, block_size=4, max_num_batched_tokens=5, caching=False, script=[7])
    for name in ("a", "b"):
        drive.add(name, 37, max_tokens=3, **fields)
        drive.run(max_steps=12)
    assert drive.engine.stats().cached_blocks == 0
    drive.assert_as_alone()


def test_who_asks_for_prompt_log_probabilities_reads_no_cache_but_fills_it() -> None:
    drive = driver(num_blocks=32, block_size=4, script=[7])
    drive.add("a", 12, prompt_logprobs=1)
    drive.run()
    drive.add("b", 12, prompt_logprobs=1)
    drive.run()
    drive.add("c", 12)
    drive.run()
    assert [drive.outputs[name, 0][0].cached_tokens for name in "abc"] == [0, 0, 8]
    assert drive.outputs["a", 0][0].prompt_logprobs == drive.outputs["b", 0][0].prompt_logprobs
    assert len(drive.outputs["a", 0][0].prompt_logprobs or ()) == 12


def test_the_judge_sees_a_wrong_block_table() -> None:
    """The scripted runner must go red, or none of these tests means anything."""
    drive = driver(num_blocks=16, block_size=4, script=[7] * 20)
    drive.add("a", 9)
    drive.add("b", [5] * 9)
    drive.step()
    table = drive.sequence("a").block_ids
    table[0], table[1] = table[1], table[0]
    drive.sequence("a").epoch += 1
    with pytest.raises(PagingError, match="a/0 reads"):
        drive.step()


def test_the_judge_sees_a_table_that_changes_without_a_new_epoch() -> None:
    drive = driver(num_blocks=16, block_size=4, script=[7] * 20)
    drive.add("a", 9)
    drive.step()
    sequence = drive.sequence("a")
    sequence.block_ids[0] = 15
    with pytest.raises(PagingError, match="in the same epoch"):
        drive.engine.step()


def test_the_judge_sees_equal_tokens_after_a_foreign_beginning() -> None:
    drive = driver(num_blocks=16, block_size=2, script=[7] * 20)
    drive.add("a", [1, 1, 7, 7, 5])
    drive.add("b", [2, 2, 7, 7, 5])
    drive.step()
    drive.sequence("b").block_ids[1] = drive.sequence("a").block_ids[1]
    drive.sequence("b").epoch += 1
    with pytest.raises(PagingError, match="b/0 reads"):
        drive.step()


HEAD = [index % 100 for index in range(40)]


def test_prompts_with_one_long_head_that_come_together_compute_it_once() -> None:
    drive = driver(num_blocks=64, block_size=4, max_num_batched_tokens=512, script=[7] * 9)
    for number in range(3):
        drive.add(f"r{number}", [*HEAD, 100 + number, 1])
    drive.add("other", [200] * 10)
    drive.step()
    assert drive.plan() == {("r0", 0): (0, 42)}
    drive.step()
    assert drive.plan() == {("r0", 0): (42, 1), ("r1", 0): (40, 2), ("r2", 0): (40, 2), ("other", 0): (0, 10)}
    drive.run()
    drive.assert_as_alone()


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ([*HEAD[:31], 100, 1], {}),  # seven blocks in common are not worth a step
        ([*HEAD, *[7] * 48], {}),  # less than half of what it has to compute
        ([100, *HEAD], {}),
        ([*HEAD, 100], {"cache_salt": "X"}),
        ([*HEAD, 100], {"prompt_logprobs": 0}),
    ],
)
def test_nobody_waits_for_a_head_that_is_not_worth_it(prompt: list[int], fields: dict[str, object]) -> None:
    drive = driver(num_blocks=64, block_size=4, max_num_batched_tokens=512, script=[7] * 9)
    drive.add("a", [*HEAD, 1, 2, 3, 4])
    drive.add("b", prompt, **fields)
    drive.step()
    assert drive.plan() == {("a", 0): (0, 44), ("b", 0): (0, len(prompt))}
    drive.run()
    drive.assert_as_alone()


@pytest.mark.parametrize(
    ("length", "own", "waits"),
    [
        (100, [7, 7], True),
        (97, [], True),  # 24 full blocks before its last token: 16 are cached, 8 come
        (96, [], False),  # 23 full blocks before its last token
        (90, [7] * 12, False),  # another block 22
    ],
)
def test_of_a_row_only_what_it_adds_is_worth_a_wait(length: int, own: list[int], waits: bool) -> None:
    head = [index % 150 for index in range(104)]
    drive = driver(num_blocks=80, block_size=4, max_num_batched_tokens=64, script=[7] * 9)
    drive.add("a", head)
    drive.step()
    drive.add("b", [*head[:length], *own])
    drive.step()
    assert drive.plan()["a", 0] == (64, 40)
    assert (("b", 0) not in drive.plan()) == waits
    drive.run()
    drive.assert_as_alone()


def test_without_a_cache_nobody_waits_for_a_head() -> None:
    drive = driver(num_blocks=64, block_size=4, max_num_batched_tokens=512, script=[7] * 9, caching=False)
    drive.add("a", HEAD)
    drive.add("b", HEAD)
    drive.step()
    assert len(drive.plan()) == 2


def test_who_waited_for_a_head_that_never_came_computes_it() -> None:
    drive = driver(num_blocks=64, block_size=4, max_num_batched_tokens=512, nan_token_id=99, script=[7] * 9)
    drive.add("bad", [*HEAD, 99])
    drive.add("good", [*HEAD, 98])
    drive.step()
    assert drive.finishes["bad", 0].error == "numeric"
    drive.step()
    assert drive.plan() == {("good", 0): (0, 41)}
    del drive.finishes["bad", 0]
    drive.run()
    drive.assert_as_alone()
