"""A step in flight: what comes, ends or fails between its launch and its landing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from headrace.engine.engine import Engine
from headrace.engine.types import EngineConfig
from tests.support.checkpoints import SHAPES
from tests.support.driver import Driver
from tests.support.scripted import LaunchingRunner, ScriptedRunner
from tests.support.torch_rig import BACKENDS, prompt, rig

SHAPE = SHAPES["gqa3-llama3"]


def make(kind: type[ScriptedRunner], num_blocks: int = 64, **runner: object) -> Driver:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32)
    return Driver(kind(num_blocks=num_blocks, block_size=4, eos_every=1000, **runner), config)  # type: ignore[arg-type]


@pytest.fixture(params=[ScriptedRunner, LaunchingRunner], ids=["runs when it lands", "runs when it is launched"])
def drive(request: pytest.FixtureRequest) -> Driver:
    return make(request.param)


def test_steps_in_two_halves_give_what_whole_ones_give(drive: Driver) -> None:
    for number in range(6):
        drive.add(f"r{number}", 5 + number)
    while drive.engine.has_work:
        drive.launch()
        drive.land()
    assert len(drive.finishes) == 6
    drive.assert_as_alone()
    drive.assert_idle()


def test_what_is_added_meanwhile_is_in_the_next_step(drive: Driver) -> None:
    drive.add("a", 5)
    drive.launch()
    drive.add("b", 5)
    assert [name for name, _, _ in drive.land().scheduled] == ["a"]
    assert [name for name, _, _ in drive.step().scheduled] == ["a", "b"]
    drive.run()
    drive.assert_as_alone()


def test_what_is_aborted_meanwhile_gives_nothing_and_keeps_its_blocks_until_the_landing(drive: Driver) -> None:
    drive.add("a", 9)
    drive.add("b", 9)
    drive.step()
    drive.launch()
    held = drive.engine.stats().free_blocks
    drive.engine.abort("a")
    drive.engine.check()
    assert drive.engine.stats().free_blocks == held, "the step may still write to them"
    assert [output.request_id for output in drive.land().outputs] == ["b"]
    assert drive.engine.stats().free_blocks > held
    drive.run()
    assert drive.tokens["a", 0] == drive.tokens["a", 0][:1]
    drive.engine.check()


def test_an_id_is_used_again_while_its_step_is_in_flight(drive: Driver) -> None:
    drive.add("a", 9)
    drive.step()
    drive.launch()
    drive.engine.abort("a")
    drive.tokens.clear()
    drive.add("a", 7)
    assert drive.land().outputs == ()
    drive.run()
    drive.assert_as_alone()


def test_a_choice_that_is_finished_meanwhile_leaves_the_others(drive: Driver) -> None:
    drive.add("a", 9, n=3, temperature=1.0, seed=3)
    for _ in range(3):
        drive.step()
    drive.launch()
    drive.engine.finish("a", 0)
    assert sorted(output.choice for output in drive.land().outputs) == [1, 2]
    drive.run()
    assert set(drive.finishes) == {("a", 1), ("a", 2)}
    drive.assert_as_alone()
    drive.assert_idle()


def test_everything_ends_while_a_step_is_in_flight(drive: Driver) -> None:
    drive.add("a", 9)
    drive.add("b", 9)
    drive.step()
    drive.launch()
    drive.engine.abort("a")
    drive.engine.abort("b")
    assert not drive.engine.has_work
    assert drive.land().outputs == ()
    drive.assert_idle()


def test_one_step_at_a_time(drive: Driver) -> None:
    assert drive.engine.land().rows == (), "nothing is in flight"
    assert not drive.engine.launch(), "nothing can run"
    drive.add("a", 9)
    drive.launch()
    with pytest.raises(RuntimeError, match="in flight"):
        drive.engine.launch()
    with pytest.raises(RuntimeError, match="in flight"):
        drive.engine.step()
    assert drive.land().outputs
    assert drive.engine.land().outputs == ()


@pytest.mark.parametrize("kind", [ScriptedRunner, LaunchingRunner])
def test_a_step_that_fails_is_computed_again(kind: type[ScriptedRunner]) -> None:
    drive = make(kind, fail_steps={3, 4})
    drive.add("a", 9)
    drive.add("b", 30)
    failures = 0
    while drive.engine.has_work:
        try:
            drive.engine.launch()
            drive.engine.check()
            drive.land()
        except RuntimeError as error:
            assert "scripted failure" in str(error)
            drive.engine.check()
            failures += 1
    assert failures == 2
    drive.assert_as_alone()
    drive.assert_idle()


# --- on torch ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", BACKENDS)
def test_neighbours_that_go_while_a_step_computes_change_nothing(threads: int, name: str) -> None:
    alone = rig(SHAPE, name)
    alone.add("me", prompt(40, SHAPE.vocab), max_tokens=12)
    want = alone.run().tokens["me", 0]

    crowd = rig(SHAPE, name)
    crowd.runner.on_logits = None  # greedy rows are scored within the step
    crowd.add("me", prompt(40, SHAPE.vocab), max_tokens=12)
    got: list[int] = []
    for number in range(200):
        crowd.add(f"{number}", prompt(20, SHAPE.vocab, number), temperature=number % 2, seed=number)
        crowd.poison_free()
        assert crowd.engine.launch()
        crowd.engine.abort(f"{number - 1}")
        outputs = crowd.engine.land().outputs
        assert all(output.finish is None or output.finish.reason == "length" for output in outputs)
        got += [token for output in outputs if output.request_id == "me" for token in output.token_ids]
        crowd.engine.check()
        if len(got) == 12:
            break
    assert got == want


def test_two_engines_have_steps_in_flight_at_once(threads: int) -> None:
    # the second one finds the threads busy and computes when it lands
    made = [rig(SHAPE), rig(SHAPE)]
    for each in made:
        each.runner.on_logits = None
        each.add("me", prompt(40, SHAPE.vocab), max_tokens=12)
    got: list[list[int]] = [[], []]
    while any(each.engine.has_work for each in made):
        for each in made:
            each.engine.launch()
        for number in (1, 0):
            got[number] += [token for output in made[number].engine.land().outputs for token in output.token_ids]
    assert len(got[0]) == 12
    assert got[0] == got[1]


def test_a_step_that_nobody_lands_is_no_harm(threads: int) -> None:
    for _ in range(5):
        made = rig(SHAPE)
        made.add("me", prompt(200, SHAPE.vocab))
        assert made.engine.launch()
        engine: Engine | None = made.engine
        del made, engine
        gc.collect()  # its memory goes: the threads must be done with it
    after = rig(SHAPE)
    after.add("me", prompt(40, SHAPE.vocab))
    assert len(after.run().tokens["me", 0]) == 4
