"""The set of running sequences: turns, order, what they will want."""

from __future__ import annotations

import pytest

from headrace.engine.intake import sequences_of
from headrace.engine.running import RunningSet
from headrace.engine.sequence import Sequence, State
from headrace.engine.types import Request, SamplingOptions
from tests.support.scripted import ScriptedRunner

LIMITS = ScriptedRunner().limits()


def sequence(arrival: int, left: int = 1, priority: int = 0, prompt: int = 10, max_tokens: int = 30) -> Sequence:
    """A sequence with `left` tokens to compute."""
    options = SamplingOptions(max_tokens=max_tokens)
    (made,) = sequences_of(Request(f"r{arrival}", (1,) * prompt, options, priority=priority), LIMITS, arrival)
    made.num_computed_tokens = prompt - left
    return made


def test_who_has_one_token_left_decodes_the_others_prefill_by_rank() -> None:
    running = RunningSet()
    one, late, early, high = sequence(0), sequence(3, left=2), sequence(2, left=9), sequence(4, left=5, priority=-1)
    for each in (one, late, early, high):
        running.join(each)
    assert list(running) == [one, high, early, late]
    assert all(each.state is State.RUNNING for each in running)
    assert running.newest_of_lowest() is late
    early.num_computed_tokens = 9
    running.turn_to_decode(early)
    running.check()
    running.leave(one)
    running.leave(late)
    assert (list(running), len(running)) == ([early, high], 2)


def test_who_was_scheduled_goes_behind_who_was_not() -> None:
    running = RunningSet()
    made = [sequence(arrival) for arrival in range(4)]
    for each in made:
        running.join(each)
    running.take_turns({made[0]: None, made[2]: None})
    assert list(running.decoding) == [made[1], made[3], made[0], made[2]]
    running.take_turns(dict.fromkeys(made))
    assert list(running.decoding) == [made[1], made[3], made[0], made[2]]  # all ran: nobody is behind


@pytest.mark.parametrize(
    ("left", "num_slots", "max_tokens", "shares_last", "wanted"),
    [
        (1, 12, 30, False, 1),  # decodes and goes on beyond its blocks
        (1, 12, 3, False, 0),  # 13 tokens at most, of which 12 are computed
        (1, 12, 4, False, 1),
        (1, 12, 3, True, 1),  # must copy
        (1, 12, 30, True, 2),
        (5, 12, 30, False, 1),  # prefills and has its blocks
        (5, 12, 3, False, 0),
        (5, 12, 4, False, 1),
        (5, 8, 30, False, 2),  # lacks one for its prompt, then goes on
        (5, 8, 3, False, 1),
        (5, 8, 4, False, 2),
        (5, 4, 3, True, 3),  # lacks two, and must copy
        (5, 4, 2, False, 2),
    ],
)
def test_how_many_blocks_will_be_wanted_soon(
    left: int, num_slots: int, max_tokens: int, shares_last: bool, wanted: int
) -> None:
    running = RunningSet()
    each = sequence(0, left, max_tokens=max_tokens)
    each.block_ids, each.num_slots, each.shares_last = [0] * (num_slots // 4), num_slots, shares_last
    running.join(each)
    assert running.num_wanted(4) == wanted


def test_check_sees_who_is_in_the_wrong_place() -> None:
    for damage in ("decoding", "prefilling", "order", "state"):
        running = RunningSet()
        one, many, more = sequence(0), sequence(1, left=3), sequence(2, left=3)
        for each in (one, many, more):
            running.join(each)
        running.check()
        if damage == "decoding":
            one.num_computed_tokens -= 1
        elif damage == "prefilling":
            many.num_computed_tokens = 9
        elif damage == "order":
            running.prefilling.reverse()
        else:
            more.state = State.ENDED
        with pytest.raises(RuntimeError):
            running.check()
