"""n > 1: one prompt, computed once, shared block by block, copied where somebody writes."""

from __future__ import annotations

import pytest

from tests.support.driver import Driver, driver

EOS = 257
PROMPT = [11, 12, 13, 14, 15, 16]  # one block and a half


def table(drive: Driver, choice: int) -> list[int]:
    return drive.sequence("a", choice).block_ids


def refs(drive: Driver) -> list[int]:
    return drive.engine._blocks.pool.refs


def three(**fields: object) -> Driver:
    """A driver with one request of three choices in it."""
    drive = driver(**{"num_blocks": 16, "block_size": 4, **fields})  # type: ignore[arg-type]
    drive.add("a", PROMPT, n=3, temperature=1, max_tokens=7, ignore_eos=True)
    return drive


def test_the_prompt_is_computed_once_and_each_choice_samples_for_itself() -> None:
    drive = three()
    drive.step()
    assert drive.plan() == {("a", 0): (0, 6)}
    assert [table(drive, choice) for choice in range(3)] == [[0, 1], [0, 1], [0, 1]]
    assert refs(drive)[:3] == [3, 3, 0]
    drive.step()
    assert drive.plan() == {("a", 0): (6, 1), ("a", 1): (5, 1), ("a", 2): (5, 1)}
    assert [table(drive, choice) for choice in range(3)] == [[0, 1], [0, 2], [0, 3]]
    assert refs(drive)[:4] == [3, 1, 1, 1]
    drive.run()
    assert len({tuple(drive.tokens["a", choice]) for choice in range(3)}) == 3
    assert all(one.cached_tokens == 0 for outputs in drive.outputs.values() for one in outputs)  # shared, not cached
    drive.assert_as_alone()
    drive.assert_idle()


def test_the_source_of_a_copy_is_held_until_the_step_that_copies_is_over() -> None:
    drive = three(caching=False)
    drive.step()
    drive.engine.finish("a", 0)
    scheduler = drive.engine._scheduler
    plan = scheduler.plan()
    assert plan.copies == ((1, 2), (1, 3))
    assert refs(drive)[:4] == [2, 2, 1, 1]  # block 1 is in nobody's table, but two copies read it
    scheduler.check()
    scheduler.cancel(plan.step)
    assert [table(drive, choice) for choice in (1, 2)] == [[0, 1], [0, 1]]
    assert refs(drive)[:4] == [2, 2, 0, 0]
    drive.step()
    assert [table(drive, choice) for choice in (1, 2)] == [[0, 3], [0, 2]]
    assert refs(drive)[:4] == [2, 0, 1, 1]
    drive.run()
    drive.assert_as_alone()


def test_a_choice_that_ends_while_its_copy_is_in_flight_leaves_nothing_even_if_the_step_fails() -> None:
    drive = three(caching=False)
    drive.step()
    scheduler = drive.engine._scheduler
    plan = scheduler.plan()
    assert plan.copies == ((1, 2), (1, 3))
    drive.engine.finish("a", 1)
    scheduler.check()
    scheduler.cancel(plan.step)
    assert refs(drive)[:4] == [2, 2, 0, 0]
    drive.run()
    drive.assert_as_alone()
    drive.assert_idle()


@pytest.mark.parametrize(("num_free", "forked"), [(1, False), (2, True)])
def test_choices_are_forked_only_if_more_is_free_than_the_running_ones_want(num_free: int, forked: bool) -> None:
    drive = driver(num_blocks=16, block_size=4, caching=False)
    drive.add("a", PROMPT, n=2, temperature=1, max_tokens=7, ignore_eos=True)
    pool = drive.engine._blocks.pool
    others = pool.allocate(pool.num_free - 2 - num_free)
    drive.engine.step()  # the first choice wants one block more
    assert (drive.engine.stats().running == 2) == forked
    pool.release(others, 0)
    drive.engine.abort("a")
    drive.assert_idle()


def test_without_a_block_for_its_copy_a_choice_gives_way_to_older_ones() -> None:
    drive = driver(num_blocks=16, block_size=4, caching=False)
    drive.add("a", PROMPT, n=2, temperature=1, max_tokens=7, ignore_eos=True)
    drive.step()
    pool = drive.engine._blocks.pool
    others = pool.allocate(pool.num_free)
    drive.engine.step()
    assert drive.plan() == {("a", 0): (6, 1)}
    assert drive.sequence("a", 1).preempted
    drive.engine._scheduler.line.check()
    pool.release(others, 0)
    while drive.engine.has_work:
        drive.engine.step()
    drive.assert_idle()


def test_a_failed_copy_is_told_by_the_epoch() -> None:
    drive = three()
    drive.step()
    fork = drive.sequence("a", 2)
    epochs = [fork.epoch]
    plan = drive.engine._scheduler.plan()
    epochs.append(fork.epoch)
    drive.engine._scheduler.cancel(plan.step)
    epochs.append(fork.epoch)
    drive.step()
    epochs.append(fork.epoch)
    assert len(set(epochs)) == 4
    drive.step()
    assert fork.epoch == epochs[-1]  # it only grew


def test_a_choice_that_gives_way_in_the_plan_takes_its_copy_out_of_it() -> None:
    drive = driver(num_blocks=16, block_size=4, caching=False)
    drive.add("a", PROMPT, n=2, temperature=1, max_tokens=7, ignore_eos=True, priority=1)
    drive.add("high", [1] * 4, max_tokens=9, ignore_eos=True, priority=-1)
    drive.step()
    scheduler, pool = drive.engine._scheduler, drive.engine._blocks.pool
    scheduler.running.decoding = {drive.sequence("a", 1): None, drive.sequence("high"): None}
    leader = drive.sequence("a", 0)
    others = pool.allocate(pool.num_free - 1)  # one is left, for the copy
    plan = scheduler.plan()
    assert [row.sequence.request_id for row in plan.rows] == ["high"]
    assert plan.copies == ()
    assert [refs(drive)[block_id] for block_id in leader.block_ids] == [1, 1]
    scheduler.cancel(plan.step)
    pool.release(others, 0)
    scheduler.running.decoding[leader] = None
    drive.run()
    drive.assert_as_alone()
    drive.assert_idle()


def test_the_last_holder_of_a_shared_block_writes_in_place() -> None:
    drive = driver(num_blocks=16, block_size=4, caching=False)
    drive.add("a", PROMPT, n=2, temperature=1, max_tokens=7, ignore_eos=True)
    drive.step()
    drive.engine.finish("a", 0)
    plan = drive.engine._scheduler.plan()
    assert (plan.copies, table(drive, 1)) == ((), [0, 1])
    drive.engine._scheduler.cancel(plan.step)
    drive.run()
    drive.assert_as_alone()


def test_the_last_holder_of_a_block_that_the_cache_knows_copies_it_all_the_same() -> None:
    drive = driver(num_blocks=16, block_size=4, max_num_batched_tokens=1)
    drive.add("a", [1, 2, 3], n=2, temperature=1, max_tokens=9, ignore_eos=True)
    for _ in range(3):
        drive.step()
    leader = drive.sequence("a", 0)
    fork = drive.sequence("a", 1)
    while leader.num_computed_tokens < 4:
        drive.engine._scheduler.running.decoding.pop(fork, None)  # hold the fork back, as a full step would
        drive.engine.step()
    drive.engine._scheduler.running.decoding[fork] = None
    drive.engine.finish("a", 0)
    assert (refs(drive)[0], drive.engine._blocks.pool.is_findable(0)) == (1, True)
    plan = drive.engine._scheduler.plan()
    assert plan.copies == ((0, fork.block_ids[0]),)
    drive.engine._scheduler.cancel(plan.step)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("prompt", range(1, 10))
def test_prompts_that_end_anywhere_in_a_block(prompt: int, budget: int, caching: bool) -> None:
    drive = driver(num_blocks=32, block_size=4, max_num_batched_tokens=budget, caching=caching)
    drive.add("a", prompt, n=3, temperature=1, max_tokens=9)
    drive.run()
    assert len(drive.finishes) == 3
    computed = [row for plan in drive.runner.plans for row in plan if row[2] < prompt - 1]
    assert sum(row[3] for row in computed) <= prompt
    assert all(row[1] == 0 for row in computed)  # nobody but the first computes the prompt
    drive.assert_as_alone()
    drive.assert_idle()


@pytest.mark.parametrize("caching", [True, False])
def test_with_fewer_places_than_choices_they_run_one_after_another(caching: bool) -> None:
    drive = three(max_num_seqs=1, caching=caching)
    drive.run()
    assert len(drive.finishes) == 3
    starts = {row[1]: row[2] for plan in reversed(drive.runner.plans) for row in plan}
    assert starts == ({0: 0, 1: 4, 2: 4} if caching else {0: 0, 1: 0, 2: 0})
    drive.assert_as_alone()


def test_choices_share_the_prompt_even_if_the_first_ends_with_its_first_token() -> None:
    drive = driver(num_blocks=16, block_size=4, caching=False)
    drive.add("a", PROMPT, n=3, temperature=1, max_tokens=1)
    drive.run()
    assert [plan[0][2:] for plan in drive.runner.plans] == [(0, 6), (5, 1)]
    assert len(drive.runner.plans[1]) == 2
    drive.assert_as_alone()


@pytest.mark.parametrize("how", ["finish", "numeric"])
def test_the_next_choice_takes_over_a_prompt_that_the_first_does_not_finish(how: str) -> None:
    drive = driver(num_blocks=16, block_size=4, max_num_batched_tokens=4, caching=False)
    drive.add("a", PROMPT, n=3, temperature=1, max_tokens=3)
    drive.step()
    if how == "finish":
        drive.engine.finish("a", 0)
    else:
        drive.runner.nan_token_id = PROMPT[4]
        drive.step()
        drive.runner.nan_token_id = None
        assert drive.finishes["a", 0].error == "numeric"
    drive.engine.check()
    drive.step()
    assert drive.plan() == {("a", 1): (0, 4)}
    drive.run()
    assert {("a", 1), ("a", 2)} <= set(drive.finishes)
    del drive.finishes["a", 0 if how == "numeric" else 1]
    drive.assert_as_alone()
    drive.assert_idle()


def test_choices_that_wait_for_the_prompt_can_end_before_it() -> None:
    drive = three(max_num_batched_tokens=4)
    drive.step()
    drive.engine.finish("a", 2)
    drive.engine.finish("a", 1)
    drive.engine.finish("a", 1)
    drive.engine.check()
    assert drive.engine.stats().waiting == 0
    drive.run()
    assert set(drive.finishes) == {("a", 0)}


def test_abort_ends_all_choices_within_the_step() -> None:
    """With n = 2 the log said aborted and the sequences ran on."""
    drive = driver(num_blocks=64, block_size=4)
    drive.add("a", PROMPT, n=2, temperature=1, max_tokens=200, ignore_eos=True)
    drive.step()
    drive.step()
    drive.engine.abort("a")
    drive.assert_idle()
    assert drive.step().outputs == ()


@pytest.mark.parametrize("when", range(5))
def test_abort_at_any_time(when: int) -> None:
    drive = three(max_num_batched_tokens=4)
    for _ in range(when):
        drive.step()
    drive.engine.abort("a")
    drive.engine.abort("a")
    drive.engine.check()
    drive.assert_idle()


@pytest.mark.parametrize("caching", [True, False])
def test_settled_tokens_are_computed_again_and_the_output_goes_on(caching: bool) -> None:
    drive = driver(num_blocks=32, block_size=4, caching=caching)
    whole = three(caching=caching)
    whole.run()
    settled = tuple(tuple(whole.tokens["a", choice][:count]) for choice, count in enumerate((4, 0, 6)))
    drive.add("a", PROMPT, n=3, temperature=1, max_tokens=7, ignore_eos=True, settled=settled)
    drive.run()
    for choice in range(3):
        assert [*settled[choice], *drive.tokens["a", choice]] == whole.tokens["a", choice]
    first = list(drive.runner.plans[0])
    assert first == [("a", 0, 0, 10)]
    second = {row[1]: row[2:] for row in drive.runner.plans[1]}
    assert second == {0: (10, 1), 1: (5, 1), 2: (6, 6)}  # the prompt is shared, the settled tokens are each one's own
    drive.assert_as_alone()


def test_choices_that_have_ended_are_not_run() -> None:
    drive = driver(num_blocks=32, block_size=4)
    settled = ((), (1, EOS), (1, 2), (1, 2, 3, 4, 5))
    drive.add("a", PROMPT, n=4, max_tokens=5, settled=settled, skip_choices=frozenset({0}))
    drive.run()
    assert set(drive.tokens) == {("a", 2)}
    assert drive.plan()["a", 2][0] >= len(PROMPT)
    with pytest.raises(ValueError, match="every choice has ended"):
        drive.add("b", PROMPT, n=2, settled=((EOS,), ()), skip_choices=frozenset({1}))
    drive.assert_idle()


def test_forks_of_lower_rank_than_one_that_waits_for_its_return_stand_behind_it() -> None:
    drive = driver(num_blocks=7, block_size=4, caching=False)
    drive.add("old", [1] * 8, max_tokens=20, ignore_eos=True)
    drive.add("gone", [2] * 8, max_tokens=8, ignore_eos=True)
    while drive.engine.stats().preemptions == 0:
        drive.step()
    drive.add("a", [3, 4], n=2, temperature=1, max_tokens=2, ignore_eos=True, priority=0)
    while ("a", 1) not in drive.tokens:
        drive.step()
    assert len(drive.tokens["gone", 0]) > 4  # it ran again before any choice of "a" was let in
    drive.run()
    drive.assert_as_alone()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [3, 4, 5, 6])
def test_choices_in_a_pool_that_holds_hardly_one(num_blocks: int, caching: bool) -> None:
    """No block for a copy: somebody gives way, in the end even the only one that runs, and comes back at once."""
    drive = driver(num_blocks=num_blocks, block_size=4, caching=caching)
    for number in range(3):
        drive.add(f"r{number}", [number] * 6, n=3, temperature=1, max_tokens=6, ignore_eos=True)
    drive.run()
    assert len(drive.finishes) == 9
    drive.assert_as_alone()
    drive.assert_idle()
