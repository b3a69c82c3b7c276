"""The line: who is next, and how long anybody can have to wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.intake import sequences_of
from headrace.engine.sequence import Sequence, State
from headrace.engine.types import Request, SamplingOptions
from headrace.engine.waiting_line import WaitingLine
from tests.support.scripted import ScriptedRunner

LIMITS = ScriptedRunner().limits()


def choices(arrival: int, priority: int = 0, n: int = 1) -> list[Sequence]:
    request = Request(f"r{arrival}", (1,), SamplingOptions(n=n), priority=priority)
    return sequences_of(request, LIMITS, arrival)


def admit_all(line: WaitingLine) -> list[int]:
    """Admit everybody; their arrival numbers in order."""
    order: list[int] = []
    while (head := line.head()) is not None:
        line.check()
        line.admit(head)
        order.append(head.arrival)
    return order


def test_priority_then_arrival() -> None:
    line = WaitingLine()
    for arrival, priority in ((0, 1), (1, 0), (2, -1), (3, 0), (4, -1)):
        line.add_request(choices(arrival, priority))
    assert [one.arrival for one in line] == [2, 4, 1, 3, 0]
    assert admit_all(line) == [2, 4, 1, 3, 0]


def test_the_preempted_of_a_priority_go_first_by_arrival() -> None:
    line = WaitingLine()
    for arrival in range(5):
        (sequence,) = choices(arrival, priority=arrival % 2)
        sequence.preempted = arrival in {2, 3, 4}
        line.add(sequence)
    assert admit_all(line) == [2, 4, 0, 3, 1]


def test_admission_forgets_that_it_was_preempted() -> None:
    line = WaitingLine()
    (sequence,) = choices(0)
    sequence.preempted = True
    line.add(sequence)
    line.admit(sequence)
    assert not sequence.preempted
    assert (len(line), line.head()) == (0, None)


def test_goes_before_compares_with_the_next_to_be_admitted() -> None:
    line = WaitingLine()
    (low, first, second) = (choices(0, 1)[0], choices(1)[0], choices(2)[0])
    assert not line.goes_before(first)
    line.add(low)
    assert not line.goes_before(first)
    line.add(first)
    assert line.goes_before(second)
    assert line.goes_before(low)
    second.preempted = True
    assert not line.goes_before(second)


def test_choices_follow_their_leader_until_it_is_done_or_gone() -> None:
    line = WaitingLine()
    first, second, third = choices(0, n=3)
    line.add_request([first, second, third])
    assert (len(line), line.num_following, second.state) == (1, 2, State.DEPENDENT)
    assert [line.leads(one) for one in (first, second, third)] == [True, False, False]
    line.remove(first)
    line.succeed(first)
    assert (line.head(), line.num_following, second.state) == (second, 1, State.WAITING)
    assert line.leads(second)
    line.admit(second)
    assert line.followers(second) == [third]
    assert (line.num_following, line.led) == (0, {})


def test_the_last_follower_that_leaves_takes_the_group_with_it() -> None:
    line = WaitingLine()
    first, second, third = choices(0, n=3)
    line.add_request([first, second, third])
    line.remove(second)
    line.check()
    line.remove(third)
    assert line.led == {}
    assert list(line.sequences()) == [first]


@given(events=st.lists(st.sampled_from([-1, 0, 1, None, None]), max_size=200))
def test_with_w_older_ones_in_line_nobody_waits_for_more_than_eight_times_w_plus_one(events: list[int | None]) -> None:
    """However the priorities come, and in whatever turn admissions and arrivals mix."""
    line = WaitingLine()
    bound: dict[int, int] = {}  # arrival → the admission by which it must be in
    admitted = 0
    for arrival, priority in enumerate(events):
        head = line.head()
        if priority is not None:
            bound[arrival] = admitted + 8 * (len(line) + 1)
            line.add_request(choices(arrival, priority))
        elif head is not None:
            line.admit(head)
            admitted += 1
            assert admitted <= bound.pop(head.arrival)
        line.check()
    for arrival in admit_all(line):
        admitted += 1
        assert admitted <= bound.pop(arrival)
    assert not bound
