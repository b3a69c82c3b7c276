"""What is held is counted by stage as it moves; the count is what a look at all of it would give."""

from __future__ import annotations

import random

import pytest

from headrace.clients.events import JobRef
from headrace.worker.held import Held, Memory, Stage
from headrace.worker.lease import Leases
from headrace.worker.options import WorkerSettings


def make_held(number: int, stage: Stage = Stage.READ) -> Held:
    return Held(JobRef("jobs", f"1-{number}"), stage)


@pytest.mark.parametrize("seed", range(20))
def test_the_counts_are_right_after_any_moves(seed: int) -> None:
    rng = random.Random(seed)
    memory = Memory(Leases(WorkerSettings()))
    held: list[Held] = []
    for number in range(200):
        what = rng.random()
        if what < 0.4 or not held:
            held.append(make_held(number, rng.choice(list(Stage))))
            memory.add(held[-1], 0.0)
        elif what < 0.8:
            rng.choice(held).stage = rng.choice(list(Stage))
        else:
            gone = held.pop(rng.randrange(len(held)))
            memory.drop(gone)
            gone.stage = rng.choice(list(Stage))  # what is not held any more counts no more
            memory.drop(gone)
        for stage in Stage:
            expected = [each for each in held if each.stage is stage]
            assert by_ref(memory.at(stage)) == by_ref(expected)
            assert memory.num_at(stage) == len(expected)
        some = rng.sample(list(Stage), 3)
        assert by_ref(memory.at(*some)) == by_ref([each for each in held if each.stage in some])
        assert memory.num_at(*some) == len(memory.at(*some))
        if held and what > 0.5:
            memory.set_alone(rng.choice(held), rng.random() < 0.5)
        assert by_ref(memory.alone()) == by_ref([each for each in held if each.alone])


def by_ref(held: list[Held]) -> list[Held]:
    return sorted(held, key=lambda each: each.ref.entry_id)


def test_what_is_in_a_stage_comes_in_the_order_in_which_it_came_there() -> None:
    memory = Memory(Leases(WorkerSettings()))
    held = [make_held(number, Stage.READ) for number in range(4)]
    for each in held:
        memory.add(each, 0.0)
    held[2].stage, held[0].stage = Stage.START, Stage.START
    assert memory.at(Stage.START) == [held[2], held[0]]
    assert memory.at(Stage.START, Stage.READ) == [held[2], held[0], held[1], held[3]]


def test_an_entry_is_held_once() -> None:
    memory = Memory(Leases(WorkerSettings()))
    memory.add(make_held(1), 0.0)
    with pytest.raises(ValueError, match="held already"):
        memory.add(make_held(1), 0.0)
    assert memory.num_at(Stage.READ) == 1
