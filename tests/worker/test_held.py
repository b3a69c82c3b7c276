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
            assert memory.at(stage) == expected
            assert memory.num_at(stage) == len(expected)
        some = rng.sample(list(Stage), 3)
        assert memory.at(*some) == [each for each in held if each.stage in some]
        assert memory.num_at(*some) == len(memory.at(*some))


def test_an_entry_is_held_once() -> None:
    memory = Memory(Leases(WorkerSettings()))
    memory.add(make_held(1), 0.0)
    with pytest.raises(ValueError, match="held already"):
        memory.add(make_held(1), 0.0)
    assert memory.num_at(Stage.READ) == 1
