"""Out of blocks: who gives way, who comes back when, and that everybody gets done with the right tokens."""

from __future__ import annotations

import pytest

from headrace.engine.sequence import Sequence
from headrace.engine.types import RequestRefusedError
from tests.support.driver import Driver, driver


def preempted(drive: Driver) -> list[str]:
    """Names of who waits for its return."""
    return [sequence.request_id for sequence in drive.engine._scheduler.line if sequence.preempted]


def step_until_preemption(drive: Driver) -> str:
    """Step until somebody has given way; say who."""
    before = drive.engine.stats().preemptions
    while drive.engine.stats().preemptions == before:
        assert drive.engine.has_work, "nobody ever gave way"
        drive.step()
    return preempted(drive)[0]


def test_the_newest_of_the_lowest_priority_gives_way() -> None:
    drive = driver(num_blocks=12, block_size=4, caching=False)
    for name, priority in (("low", 1), ("lowest new", 1), ("normal", 0)):
        drive.add(name, [len(name)] * 12, max_tokens=36, ignore_eos=True, priority=priority)
    assert step_until_preemption(drive) == "lowest new"
    assert step_until_preemption(drive) in {"low", "lowest new"}
    drive.run()
    drive.assert_as_alone()
    drive.assert_idle()


def test_who_is_planned_already_leaves_the_plan_when_it_gives_way() -> None:
    """A request of low priority, first in the step, was evicted by a later one and computed all the same."""
    drive = driver(num_blocks=8, block_size=4, caching=False)
    for name, prompt, priority in (("low", 4, 1), ("mid", 6, 0), ("high", 4, -1)):
        drive.add(name, [prompt] * prompt, max_tokens=16, ignore_eos=True, priority=priority)
        drive.step()
    assert next(iter(drive.plan())) == ("low", 0)  # it is first in each step
    while drive.engine.stats().preemptions == 0:
        assert set(drive.plan()) == {("low", 0), ("mid", 0), ("high", 0)}
        low = drive.sequence("low")
        had_room_for_its_token = low.num_computed_tokens < low.num_slots
        drive.step()
    assert had_room_for_its_token
    assert preempted(drive) == ["low"]
    assert set(drive.plan()) == {("mid", 0), ("high", 0)}
    drive.run()
    drive.assert_as_alone()  # no token index is missing or repeated: the driver looks at each


def test_the_token_of_who_gives_way_in_the_plan_goes_to_another() -> None:
    drive = driver(num_blocks=32, block_size=4, caching=False)
    for name, prompt, priority in (("low", 5, 1), ("b", 6, 0), ("high", 4, -1), ("c", 5, 0)):
        drive.add(name, [prompt] * prompt, max_tokens=20, ignore_eos=True, priority=priority)
    drive.step()
    scheduler, pool = drive.engine._scheduler, drive.engine._blocks.pool
    scheduler.running.decoding = {drive.sequence(name): None for name in ("low", "b", "high", "c")}
    others = pool.allocate(pool.num_free)
    scheduler._budget = 3
    plan = scheduler.plan()  # low, b, then high needs a block, takes low's, and c takes its token
    assert [row.sequence.request_id for row in plan.rows] == ["b", "high", "c"]
    assert (preempted(drive), pool.num_free) == (["low"], 1)
    scheduler.cancel(plan.step)
    pool.release(others, 0)
    scheduler._budget = 64
    drive.run()
    drive.assert_as_alone()


def test_there_is_no_room_while_one_waits_for_its_return_though_nobody_could_be_tried() -> None:
    drive = driver(num_blocks=32, block_size=4, caching=False)
    for name, prompt in (("a", 4), ("b", 5), ("c", 30)):
        drive.add(name, [prompt] * prompt, max_tokens=20, ignore_eos=True)
    drive.step()
    scheduler, pool = drive.engine._scheduler, drive.engine._blocks.pool
    others = pool.allocate(pool.num_free)
    scheduler._budget = 2  # all of it for a and b
    drive.engine.step()
    assert preempted(drive) == ["c"]
    assert scheduler.blocks.spare(scheduler.blocks.wanted(scheduler.running)) > 0
    assert drive.engine.room() == 0
    pool.release(others, 0)


def test_a_preempted_one_resumes_before_twenty_that_came_later() -> None:
    """It was put behind later work and computed again and again."""
    drive = driver(num_blocks=8, block_size=4, max_num_seqs=3, caching=False)
    drive.add("a", [1] * 8, max_tokens=24, ignore_eos=True)
    drive.add("b", [2] * 8, max_tokens=12, ignore_eos=True)
    assert step_until_preemption(drive) == "b"
    for number in range(20):
        drive.add(f"later {number}", [3], max_tokens=2)
    drive.runner.plans.clear()
    drive.run()
    order = list(dict.fromkeys(row[0] for plan in drive.runner.plans for row in plan))
    assert order[:2] == ["a", "b"]
    drive.assert_as_alone()


def test_higher_priority_goes_before_a_preempted_one() -> None:
    drive = driver(num_blocks=8, block_size=4, caching=False)
    drive.add("a", [1] * 8, max_tokens=24, ignore_eos=True)
    drive.add("b", [2] * 8, max_tokens=12, ignore_eos=True)
    step_until_preemption(drive)
    drive.add("high", [3], max_tokens=2, priority=-1)
    drive.step()
    assert ("high", 0) in drive.plan()
    assert preempted(drive) == ["b"]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt", range(1, 9))
def test_giving_way_at_any_place_in_a_block_loses_no_token(prompt: int, caching: bool) -> None:
    """At exactly one token past a full block, the new token was dropped on the way back."""
    drive = driver(num_blocks=5, block_size=4, caching=caching)
    drive.add("a", 4, max_tokens=16, ignore_eos=True)
    drive.add("b", [5] * prompt, max_tokens=20 - prompt, ignore_eos=True)
    assert step_until_preemption(drive) == "b"
    assert drive.sequence("b").num_tokens == prompt + len(drive.tokens["b", 0])
    drive.run()
    drive.assert_as_alone()
    drive.assert_idle()


def test_who_comes_back_finds_its_own_blocks_in_the_cache() -> None:
    """The tokens to compute were counted before the hit, and the step read past the end."""
    drive = driver(num_blocks=6, block_size=4)
    drive.add("a", [1] * 6, max_tokens=8, ignore_eos=True)
    drive.add("b", [2] * 7, max_tokens=12, ignore_eos=True)
    assert step_until_preemption(drive) == "b"
    assert drive.sequence("b").num_tokens == 13  # three full blocks, of which a takes one
    drive.runner.plans.clear()
    while ("b", 0) not in drive.finishes:
        drive.step()
    resumed = next(row for plan in drive.runner.plans for row in plan if row[0] == "b")
    assert resumed == ("b", 0, 8, 5)
    assert drive.engine.stats().prefix_hits == 7  # of its prompt
    assert drive.outputs["b", 0][-1].cached_tokens == 0  # what is reported is the first admission
    drive.assert_as_alone()


def test_two_prompts_that_each_fill_nine_tenths_of_the_pool() -> None:
    """Together they once hung the server."""
    drive = driver(num_blocks=20, block_size=4, max_num_batched_tokens=16, caching=False)
    drive.add("a", 72, max_tokens=8, ignore_eos=True)
    drive.add("b", [5] * 72, max_tokens=8, ignore_eos=True)
    drive.run(max_steps=30)
    assert drive.engine.stats().preemptions == 0
    drive.assert_as_alone()


@pytest.mark.parametrize("caching", [True, False])
def test_eight_endless_outputs_in_a_small_pool_all_come_to_their_end(caching: bool) -> None:
    """Output filled the pool to the last block and nothing moved."""
    drive = driver(num_blocks=16, block_size=4, max_model_len=64, caching=caching)
    for number in range(8):
        drive.add(f"r{number}", [number] * 3, max_tokens=10**9, ignore_eos=True)
    drive.run()
    assert all(drive.finishes[f"r{number}", 0].reason == "length" for number in range(8))
    assert all(len(drive.tokens[f"r{number}", 0]) == 61 for number in range(8))
    drive.assert_as_alone()


def test_the_oldest_of_the_highest_priority_computes_in_every_step() -> None:
    drive = driver(num_blocks=10, block_size=4)
    for number in range(6):
        drive.add(f"r{number}", [number] * 6, max_tokens=30, ignore_eos=True, priority=number % 2)
    drive.step()
    while drive.engine.has_work:
        first = min(drive.engine._scheduler.running, key=lambda one: (one.priority, one.arrival), default=None)
        drive.step()
        assert first is None or (first.request_id, first.choice) in drive.plan()
    drive.assert_as_alone()


def test_a_request_larger_than_the_pool_is_refused_at_once_and_the_next_is_served() -> None:
    """It waited for ever, within max_model_len, and all behind it."""
    drive = driver(num_blocks=64, block_size=16, max_model_len=4096)
    with pytest.raises(RequestRefusedError) as refusal:
        drive.add("huge", 1500)
    assert refusal.value.code == "kv_capacity"
    with pytest.raises(RequestRefusedError) as refusal:
        drive.add("long", 10, max_tokens=1015)  # one token more than fits
    assert refusal.value.code == "kv_capacity"
    drive.add("next", 10, max_tokens=1014)
    drive.run()
    drive.assert_as_alone()


def test_what_fills_the_pool_exactly_runs_alone() -> None:
    drive = driver(num_blocks=4, block_size=4)
    drive.add("a", 1, max_tokens=15, ignore_eos=True)
    drive.add("b", 15, max_tokens=1, ignore_eos=True)
    drive.run()
    assert len(drive.tokens["a", 0]) == 15
    drive.assert_as_alone()


def test_an_admission_leaves_the_blocks_that_the_others_will_soon_need() -> None:
    drive = driver(num_blocks=10, block_size=4, caching=False)
    drive.add("a", [1] * 7, max_tokens=20, ignore_eos=True)  # 2 blocks now, 7 in the end
    drive.step()
    drive.add("b", [2] * 27, max_tokens=5, ignore_eos=True)  # 7 now, 8 in the end: 9 free with 2 to be left is too few
    drive.step()
    assert drive.engine.stats().waiting == 1
    assert drive.engine.room() == 0
    while drive.engine.stats().waiting:
        drive.step()
    assert ("a", 0) in drive.finishes
    drive.run()
    assert drive.engine.stats().preemptions == 0
    drive.assert_as_alone()


@pytest.mark.parametrize("prompt", range(1, 12))
def test_no_admission_preempts_anybody_within_a_block_of_steps(prompt: int) -> None:
    drive = driver(num_blocks=9, block_size=4, caching=False)
    for number in range(4):
        drive.add(f"r{number}", [number] * (prompt + number), max_tokens=18, ignore_eos=True)
    admitted_at = 0
    while drive.engine.has_work:
        before = drive.engine.stats()
        drive.step()
        after = drive.engine.stats()
        if after.running > before.running:
            admitted_at = after.step
        if after.preemptions > before.preemptions:
            assert after.step - admitted_at >= 4
    drive.assert_as_alone()


def test_blocks_of_a_step_in_flight_are_not_planned_again() -> None:
    """A finished request's place was given to the next one while the step under way still wrote to it."""
    drive = driver(num_blocks=2, block_size=4, caching=False)
    drive.add("a", [1] * 5, max_tokens=3)
    scheduler = drive.engine._scheduler
    plan = scheduler.plan()
    assert plan.rows[0].sequence.block_ids == [0, 1]
    drive.engine.abort("a")
    drive.add("b", [2] * 5, max_tokens=3)
    assert scheduler.plan().rows == ()  # the blocks are a's until its step is over
    assert drive.engine.stats().free_blocks == 0
    scheduler.retire(plan.step)
    assert drive.engine.stats().free_blocks == 2
    assert scheduler.plan().rows[0].sequence.request_id == "b"


def test_who_lacks_blocks_waits_for_the_step_in_flight_rather_than_take_others_away() -> None:
    drive = driver(num_blocks=9, block_size=4, caching=False)
    drive.add("a", [1] * 8, max_tokens=8, ignore_eos=True)
    drive.add("b", [2] * 2, max_tokens=3, ignore_eos=True)
    drive.add("c", [3], max_tokens=3, ignore_eos=True)
    drive.step()  # 2 + 1 + 1 blocks; now a needs a third
    pool = drive.engine._blocks.pool
    others = pool.allocate(pool.num_free)
    drive.sequence("b").last_step += 1  # as if a step with b were in flight
    drive.engine.abort("b")
    scheduler = drive.engine._scheduler
    plan = scheduler.plan()
    assert [row.sequence.request_id for row in plan.rows] == ["c"]
    assert scheduler.num_preemptions == 0
    scheduler.cancel(plan.step)  # retires the step, so b's block comes free
    assert [row.sequence.request_id for row in scheduler.plan().rows] == ["a", "c"]
    assert scheduler.num_preemptions == 0
    assert len(others) == 5


@pytest.mark.parametrize(("max_tokens", "admitted"), [(1, True), (2, False)])
def test_who_will_never_need_another_block_leaves_none_free_for_itself(max_tokens: int, admitted: bool) -> None:
    """Its last token is sampled, never computed: eight tokens and one fill two blocks, and that is all."""
    drive = driver(num_blocks=5, block_size=4, caching=False)
    drive.add("a", [1] * 7, max_tokens=13, ignore_eos=True)  # two blocks, and soon a third
    drive.step()
    drive.add("b", [2] * 8, max_tokens=max_tokens, ignore_eos=True)
    drive.step()
    assert (("b", 0) in drive.plan()) == admitted
    drive.run()
    drive.assert_as_alone()


def admissions_tried(drive: Driver) -> list[int]:
    """Step counts at which somebody was tried to be let in, from now on."""
    blocks, tried = drive.engine._blocks, list[int]()
    admit = blocks.admit

    def watched(sequence: Sequence, headroom: int) -> int:
        tried.append(drive.engine.step_count)
        return admit(sequence, headroom)

    blocks.admit = watched  # type: ignore[method-assign]
    return tried


def test_who_lacks_blocks_is_not_looked_up_in_every_step() -> None:
    """A long prompt at the head of the line would be hashed again and again."""
    drive = driver(num_blocks=30, block_size=4)
    drive.add("a", [1] * 7, max_tokens=100, ignore_eos=True)
    drive.step()
    tried = admissions_tried(drive)
    drive.add("b", [2] * 105, max_tokens=10, ignore_eos=True)
    for _ in range(40):
        drive.step()
    assert len(tried) == 1 + 40 // 15
    drive.engine.abort("a")
    drive.step()
    assert ("b", 0) in drive.plan()


def test_who_lacks_blocks_is_tried_again_as_soon_as_enough_are_free() -> None:
    drive = driver(num_blocks=30, block_size=4, max_num_batched_tokens=200, caching=False)
    drive.add("a", [1] * 8, max_tokens=90, ignore_eos=True)
    drive.add("c", [3] * 15, max_tokens=2, ignore_eos=True)
    drive.step()
    drive.add("b", [2] * 99, max_tokens=10, ignore_eos=True)  # 25 blocks, one more for a and one for itself
    drive.step()
    assert ("c", 0) in drive.finishes
    assert (drive.engine.stats().waiting, drive.engine.stats().free_blocks) == (1, 27)
    drive.step()
    assert ("b", 0) in drive.plan()


def test_who_lacks_blocks_is_tried_again_even_if_no_more_become_free() -> None:
    """What the others will want may become less, too."""
    drive = driver(num_blocks=7, block_size=16, max_num_batched_tokens=1, caching=False)
    drive.add("a", [1] * 3, n=2, max_tokens=30, ignore_eos=True)
    for _ in range(3):
        drive.step()  # two choices share one block, and will want three more
    drive.add("b", [2] * 64, max_tokens=2, ignore_eos=True)
    drive.step()
    assert (drive.engine.stats().waiting, drive.engine.stats().free_blocks) == (1, 6)
    drive.engine.finish("a", 1)
    assert drive.engine.stats().free_blocks == 6
    while drive.engine.stats().waiting:
        drive.step()
    assert drive.engine.step_count == 16
    assert ("a", 0) not in drive.finishes
