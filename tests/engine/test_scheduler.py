"""Who computes how much in which step: plans, turns, order, places."""

from __future__ import annotations

import pytest

from tests.support.driver import Driver, driver

EOS = 257


def decoding(drive: Driver, count: int, max_tokens: int = 150) -> list[str]:
    """Bring `count` sequences to where each needs one token a step."""
    names = [f"d{number}" for number in range(count)]
    for name in names:
        drive.add(name, [ord(name[-1])], max_tokens=max_tokens, ignore_eos=True)
    while any(len(drive.tokens.get((name, 0), ())) == 0 for name in names):
        drive.step()
    return names


def test_a_prompt_is_computed_at_once_and_then_a_token_a_step() -> None:
    drive = driver(script=[7, 8, 9])
    drive.add("a", 5)
    drive.run()
    assert [dict(enumerate(plan)) for plan in drive.runner.plans] == [
        {0: ("a", 0, 0, 5)},
        {0: ("a", 0, 5, 1)},
        {0: ("a", 0, 6, 1)},
        {0: ("a", 0, 7, 1)},
    ]
    assert drive.tokens["a", 0] == [7, 8, 9, EOS]
    drive.assert_idle()


def test_a_long_prompt_comes_in_chunks_and_only_the_last_samples() -> None:
    drive = driver(max_num_batched_tokens=4, script=[7])
    drive.add("a", 10)
    outputs = [drive.step().outputs for _ in range(3)]
    assert [plan[0][2:] for plan in drive.runner.plans] == [(0, 4), (4, 4), (8, 2)]
    assert [len(given) for given in outputs] == [0, 0, 1]


def test_decodes_come_first_and_chunks_fill_the_step() -> None:
    drive = driver(max_num_batched_tokens=8)
    decoding(drive, 2)
    drive.add("new", 20)
    drive.step()
    assert drive.plan() == {("d0", 0): (1, 1), ("d1", 0): (1, 1), ("new", 0): (0, 6)}
    drive.step()
    assert drive.plan() == {("d0", 0): (2, 1), ("d1", 0): (2, 1), ("new", 0): (6, 6)}


def test_a_chunk_and_the_next_prompt_share_a_step() -> None:
    drive = driver(max_num_batched_tokens=8, caching=False)
    drive.add("a", 12)
    drive.add("b", [1, 2, 3, 4, 5, 6])
    drive.step()
    assert drive.plan() == {("a", 0): (0, 8)}
    drive.step()
    assert drive.plan() == {("a", 0): (8, 4), ("b", 0): (0, 4)}
    drive.step()
    assert drive.plan() == {("a", 0): (12, 1), ("b", 0): (4, 2)}


def test_a_quarter_of_the_step_is_for_prefills_and_those_left_out_decode_first_next_time() -> None:
    drive = driver(num_blocks=500, max_num_seqs=20, max_num_batched_tokens=8)
    names = decoding(drive, 10)
    drive.runner.plans.clear()
    drive.add("new", 9)
    seen: dict[str, int] = dict.fromkeys(names, 0)
    for step in range(5):
        drive.step()
        plan = drive.plan()
        assert sum(count for _, count in plan.values()) == 8
        if step < 4:
            assert plan["new", 0] == (2 * step, 2)
            assert len(plan) == 7  # six decodes
        for request_id, _ in plan:
            if request_id != "new":
                seen[request_id] += 1
    assert max(seen.values()) - min(seen.values()) <= 1


def test_decodes_beyond_the_budget_take_turns() -> None:
    drive = driver(num_blocks=500, max_num_seqs=20, max_num_batched_tokens=2)
    names = decoding(drive, 5)
    drive.runner.plans.clear()
    for _ in range(10):
        drive.step()
    count = [sum(name == row[0] for plan in drive.runner.plans for row in plan) for name in names]
    assert count == [4] * 5
    for first, second in zip(drive.runner.plans, drive.runner.plans[1:], strict=False):
        assert not {row[0] for row in first} & {row[0] for row in second}


def test_what_prefills_cannot_use_goes_to_decodes() -> None:
    drive = driver(num_blocks=500, max_num_seqs=20, max_num_batched_tokens=8)
    decoding(drive, 10)
    drive.add("new", 1)
    drive.step()
    assert len(drive.plan()) == 8
    assert ("new", 0) in drive.plan()


def test_nothing_is_reserved_for_who_finds_no_place() -> None:
    drive = driver(num_blocks=500, max_num_seqs=10, max_num_batched_tokens=8)
    decoding(drive, 10)
    drive.add("new", 5)
    drive.step()
    assert len(drive.plan()) == 8
    assert ("new", 0) not in drive.plan()
    assert drive.engine.stats().waiting == 1


def test_with_one_token_a_step_decodes_and_prefills_alternate() -> None:
    drive = driver(max_num_batched_tokens=1)
    decoding(drive, 1)
    drive.add("new", 4)
    drive.runner.plans.clear()
    for _ in range(8):
        drive.step()
    names = [plan[0][0] for plan in drive.runner.plans]
    assert names.count("new") == 4
    assert names.count("d0") == 4
    drive.add("more", 3, max_tokens=2)
    while ("more", 0) not in drive.finishes:
        drive.step()
    drive.assert_as_alone()


def test_chunks_go_by_priority_then_arrival() -> None:
    drive = driver(num_blocks=200, max_num_batched_tokens=4, caching=False)
    drive.add("low", 8, priority=1)
    drive.step()
    drive.add("normal", [5] * 8)
    drive.add("later", [6] * 8)
    drive.add("high", [7] * 8, priority=-1)
    order: list[str] = []
    while len(order) < 4:
        drive.step()
        order += [row[0] for row in drive.runner.plans[-1] if row[3] > 1 and row[0] not in order]
    assert order == ["high", "normal", "later", "low"]


def test_a_started_prefill_of_low_priority_is_not_starved_by_a_stream_of_higher_ones() -> None:
    drive = driver(num_blocks=4000, max_num_seqs=50, max_num_batched_tokens=16, caching=False)
    drive.add("low", 160, priority=1, max_tokens=1)
    drive.step()
    steps = 0
    while ("low", 0) not in drive.finishes:
        drive.add(f"h{steps}", [steps % 250] * 16, priority=-1, max_tokens=1)
        drive.step()
        steps += 1
    assert steps <= 8 * 10  # a chunk of 16 at least in every eighth step


def test_a_sequence_joins_in_the_step_after_another_leaves() -> None:
    drive = driver(max_num_seqs=2, script=[7, 8])
    for name in ("a", "b", "c"):
        drive.add(name, [ord(name)])
    for _ in range(3):
        drive.step()
        assert drive.engine.stats().running <= 2
    assert set(drive.finishes) == {("a", 0), ("b", 0)}
    drive.step()
    assert drive.plan() == {("c", 0): (0, 1)}


def test_the_high_priority_job_that_came_last_is_let_in_first() -> None:
    """A priority that the client gives must reach the scheduler."""
    drive = driver(max_num_seqs=2, script=[7] * 6)
    for number in range(6):
        drive.add(f"r{number}", [number], priority=number % 2)
    drive.add("vip", [99], priority=-1)
    drive.step()
    drive.run()
    order = list(dict.fromkeys(row[0] for plan in drive.runner.plans for row in plan))
    assert order == ["vip", "r0", "r2", "r4", "r1", "r3", "r5"]


def test_the_eighth_admission_is_for_the_oldest_whatever_its_priority() -> None:
    """However many high jobs come, a low one waits for at most eight admissions per older one in line."""
    drive = driver(max_num_seqs=1, script=[])
    drive.add("low", [1], priority=1)
    drive.add("normal", [2])
    for number in range(30):
        drive.add(f"h{number}", [3 + number], priority=-1)
    order: list[str] = []
    while ("normal", 0) not in drive.finishes:
        drive.step()
        order += [row[0] for row in drive.runner.plans[-1]]
    assert order.index("low") == 7
    assert order.index("normal") == 15
    assert order[:7] == [f"h{number}" for number in range(7)]


def test_whose_turn_the_eighth_is_but_does_not_fit_is_waited_for() -> None:
    """Else a stream of small high jobs could keep a large low one out for ever."""
    drive = driver(num_blocks=20, max_num_seqs=4, script=[7] * 30, caching=False)
    for number in range(3):
        drive.add(f"s{number}", [number] * 4, priority=-1, max_tokens=30)
    drive.step()
    drive.add("large", 60, priority=1, max_tokens=1)
    drive.step()
    done = 0
    while ("large", 0) not in drive.finishes:
        drive.add(f"h{done}", [done] * 4, priority=-1, max_tokens=1)
        drive.step()
        done += 1
        assert done < 100
    drive.run()
    drive.assert_as_alone()


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("seqs", [1, 3, 8])
def test_every_budget_and_number_of_places_gives_the_same_tokens(budget: int, seqs: int) -> None:
    drive = driver(num_blocks=200, max_num_seqs=seqs, max_num_batched_tokens=budget)
    for number in range(8):
        drive.add(f"r{number}", [number, *range(number * 3)], max_tokens=12, priority=number % 3 - 1)
    drive.run()
    assert len(drive.finishes) == 8
    drive.assert_as_alone()
    drive.assert_idle()
