"""Two steps in flight: the same tokens as one after the other, whatever comes, ends, gives way or fails meanwhile."""

from __future__ import annotations

import random

import pytest

from headrace.engine.types import EngineConfig
from tests.support.driver import Driver
from tests.support.overlapping import LateRunner, OverlappingRunner

KINDS = [OverlappingRunner, LateRunner]


def make(
    kind: type[OverlappingRunner], num_blocks: int = 64, depth: int = 2, seqs: int = 4, **runner: object
) -> Driver:
    fields = {"block_size": 4, "eos_every": 1000, **runner}
    made = kind(num_blocks=num_blocks, depth=depth, **fields)  # type: ignore[arg-type]
    return Driver(made, EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=32))


@pytest.fixture(params=KINDS)
def drive(request: pytest.FixtureRequest) -> Driver:
    return make(request.param)


def test_a_step_begins_before_the_one_before_has_landed(drive: Driver) -> None:
    drive.add("a", 9, max_tokens=6)
    drive.add("b", 5, max_tokens=4)
    drive.launch()
    assert drive.engine.step_count == 0
    assert [name for name, _, _ in drive.land().scheduled] == ["a", "b"]
    assert [count for _, _, count in drive.step().scheduled] == [1, 1], "planned before the first tokens were known"
    drive.run()
    assert drive.runner.most_in_flight == 2  # type: ignore[attr-defined]
    drive.assert_as_alone()
    drive.assert_idle()


def test_nobody_is_planned_beyond_its_last_token(drive: Driver) -> None:
    drive.add("a", 5, max_tokens=3)
    steps = 0
    while drive.engine.has_work:
        steps += bool(drive.step().outputs)
    assert steps == 3
    assert len(drive.runner.plans) == 3
    drive.assert_idle()


def test_a_stop_that_is_found_when_the_next_step_is_in_flight_costs_that_steps_token(drive: Driver) -> None:
    drive.add("a", 5, max_tokens=9, logit_bias={70: 50.0}, stop_token_ids=(70,), min_tokens=2)
    drive.add("b", 5, max_tokens=9)
    drive.run()
    assert drive.tokens["a", 0][-1] == 70
    assert len(drive.tokens["a", 0]) == 3
    drive.assert_as_alone()
    drive.assert_idle()


def test_a_stop_of_the_last_request_leaves_nothing_in_flight(drive: Driver) -> None:
    drive.add("a", 5, max_tokens=9, logit_bias={70: 50.0}, stop_token_ids=(70,), min_tokens=2)
    drive.run()
    drive.assert_idle()


def test_an_abort_leaves_the_blocks_to_both_steps(drive: Driver) -> None:
    drive.add("a", 9)
    drive.add("b", [7] * 9)
    drive.step()
    drive.launch()
    held = drive.engine.stats().free_blocks
    drive.engine.abort("a")
    assert drive.engine.stats().free_blocks == held
    drive.land()
    assert drive.engine.stats().free_blocks == held, "the second step may still write to them"
    drive.step()
    assert drive.engine.stats().free_blocks > held
    drive.run()
    drive.assert_as_alone()


def test_nobody_gives_way_in_flight() -> None:
    """It would give its blocks to nobody before it lands, and lose what is computed for it."""
    drive = make(LateRunner, num_blocks=8)
    for number in range(2):
        drive.add(f"{number}", [number] * 8, max_tokens=20)
    while drive.engine.has_work:
        held = {id(row.sequence) for flight in drive.engine._flights._flights for row in flight.plan.rows}
        drive.launch()
        gone = [each for each in drive.engine._scheduler.line.sequences() if each.preempted]
        assert held.isdisjoint(map(id, gone))
        drive.land()
    assert drive.engine.stats().preemptions > 0
    drive.assert_as_alone()
    drive.assert_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_takes_both_steps_back(kind: type[OverlappingRunner]) -> None:
    drive = make(kind, fail_steps={4, 9})
    drive.add("a", 9)
    drive.add("b", 30)
    failures = 0
    while drive.engine.has_work:
        try:
            drive.step()
        except RuntimeError as error:
            assert "scripted failure" in str(error)
            drive.engine.check()
            failures += 1
    assert failures == 2
    drive.assert_as_alone()
    drive.assert_idle()


def play(seed: int, kind: type[OverlappingRunner], depth: int) -> tuple[dict[object, object], int]:
    """A schedule with tiny pools, in which requests come, are aborted and are finished at the times they ask for."""
    dice = random.Random(seed)
    block_size = dice.choice([1, 2, 4])
    made = kind(
        num_blocks=dice.randint(6, 16), block_size=block_size, depth=depth, max_model_len=24, vocab_size=40,
        eos_token_ids=frozenset({13}), eos_every=9, nan_token_id=39,
    )  # fmt: skip
    config = EngineConfig(dice.randint(1, 5), dice.randint(1, 12), enable_prefix_caching=dice.random() < 0.5)
    drive, limits = Driver(made, config), {}
    for number in range(dice.randint(2, 7)):
        most = min(20, made.num_blocks * block_size)
        prompt = [*range(1, dice.randint(1, 5)), *(dice.randint(0, 12) for _ in range(dice.randint(1, 3)))][: most - 1]
        tokens = min(dice.randint(1, 12), most - len(prompt))
        drive.add(f"{number}", prompt, max_tokens=tokens, n=dice.randint(1, 2), temperature=dice.choice([0.0, 1.0]),
                  seed=number, min_tokens=dice.randint(0, 2), priority=dice.randint(-1, 1))  # fmt: skip
        limits[f"{number}"] = dice.choice([99, 99, dice.randint(1, 6)])  # a stop string stands behind so many tokens
    while drive.engine.has_work:
        for output in drive.step().outputs:
            if len(drive.tokens[output.request_id, output.choice]) == limits[output.request_id]:
                drive.engine.finish(output.request_id, output.choice)
    drive.land()  # of which nobody may be left
    drive.assert_idle()
    return dict(drive.tokens), made.most_in_flight


@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_give_the_tokens_of_one_step_at_a_time(kind: type[OverlappingRunner]) -> None:
    overlapped = 0
    for seed in range(500):
        got, in_flight = play(seed, kind, depth=2)
        want, alone = play(seed, kind, depth=1)
        assert got == want, f"seed {seed}"
        assert alone <= 1
        overlapped += in_flight == 2
    assert overlapped > 450
