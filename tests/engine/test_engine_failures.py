"""The engine when something goes wrong, when callers change their minds, and what is left afterwards: nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.engine.engine import Engine
from headrace.engine.types import EngineConfig, Plan, Request, RowResult, SamplingOptions
from tests.support.driver import driver
from tests.support.scripted import ScriptedRunner

# -------------------------------------------------------------------------------------------------------- when it fails


def test_a_row_that_is_not_finite_ends_its_choice_and_no_other() -> None:
    drive = driver(nan_token_id=99, script=[7] * 5)
    drive.add("bad", [1, 99, 2])
    drive.add("good", [1, 98, 2])
    drive.run()
    (only,) = drive.outputs["bad", 0]
    assert (only.token_ids, only.index) == ((), 0)
    assert only.finish is not None
    assert (only.finish.reason, only.finish.error) == ("error", "numeric")
    assert drive.finishes["good", 0].reason == "stop"
    drive.assert_idle()


def test_a_choice_that_fails_later_keeps_its_index() -> None:
    drive = driver(nan_token_id=99, script=[7, 8, 99, 9])
    drive.add("a", [1])
    drive.run()
    last = drive.outputs["a", 0][-1]
    assert (last.index, last.token_ids, last.finish and last.finish.error) == (3, (), "numeric")


def test_a_runner_that_gives_no_token_ends_the_choice() -> None:
    class Silent(ScriptedRunner):
        def run(self, plan: Plan) -> list[RowResult]:
            return [RowResult() for _ in plan.rows]

    engine = Engine(Silent(), EngineConfig())
    engine.add(Request("a", (1, 2)))
    (output,) = engine.step().outputs
    assert output.finish is not None
    assert output.finish.error == "internal"
    assert not engine.has_work
    engine.check()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_step_that_fails_has_not_happened_and_is_computed_again(n: int, caching: bool) -> None:
    drive = driver(num_blocks=12, block_size=4, max_num_batched_tokens=7, caching=caching)
    for number in range(3):
        drive.add(f"r{number}", [number] * (5 + number), n=n, temperature=1, max_tokens=9, ignore_eos=True)
    drive.runner.fail_steps = range(1, 2000, 2)  # every second one, having written half of its rows
    failures = 0
    for _ in range(2000):
        if not drive.engine.has_work:
            break
        count = drive.engine.step_count
        try:
            drive.step()
        except RuntimeError as error:
            assert "scripted failure" in str(error)
            assert drive.engine.step_count == count  # whoever watches sees that nothing moves
            drive.engine.check()
            failures += 1
    assert failures > 10
    assert len(drive.finishes) == 3 * n
    drive.assert_as_alone()
    drive.assert_idle()


def test_a_runner_that_gives_too_few_results_is_told_so_and_nothing_is_lost() -> None:
    class Short(ScriptedRunner):
        short = True

        def run(self, plan: Plan) -> list[RowResult]:
            return super().run(plan)[: -1 if self.short else None]

    runner = Short(script=[7])
    engine = Engine(runner, EngineConfig())
    engine.add(Request("a", (1, 2)))
    with pytest.raises(RuntimeError, match="0 results for 1 rows"):
        engine.step()
    engine.check()
    runner.short = False
    assert engine.step().outputs[0].token_ids == (7,)


# ---------------------------------------------------------------------------------------------------- what is left over


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "ended", "unknown"])
def test_abort_in_any_state_is_done_at_once_and_may_be_repeated(when: str) -> None:
    drive = driver(max_num_batched_tokens=4, max_num_seqs=1 if when == "waiting" else 8, script=[7] * 5)
    if when == "waiting":
        drive.add("first", 9)
    drive.add("a", 9)
    for _ in range({"waiting": 1, "prefill": 1, "decode": 4, "ended": 20, "unknown": 1}[when]):
        drive.step()
    target = "nobody" if when == "unknown" else "a"
    for _ in range(2):
        drive.engine.abort(target)
        drive.engine.check()
    if when == "waiting":
        drive.engine.abort("first")
    if when != "unknown":
        drive.assert_idle()
    drive.run()


def test_the_token_of_a_request_that_ends_while_its_step_is_in_flight_is_discarded() -> None:
    class Impatient(ScriptedRunner):
        def run(self, plan: Plan) -> list[RowResult]:
            results = super().run(plan)
            engine.abort("a")
            assert engine.stats().free_blocks == 8 - 4  # the blocks of both are still written
            return results

    engine = Engine(Impatient(num_blocks=8, block_size=4), EngineConfig())
    engine.add(Request("a", (1, 2, 3, 4, 5), SamplingOptions(max_tokens=9)))
    engine.add(Request("b", (2, 2, 3, 4, 6), SamplingOptions(max_tokens=9)))
    assert [one.request_id for one in engine.step().outputs] == ["b"]
    engine.check()
    assert engine.stats().free_blocks == 8 - 2


def test_who_lacked_blocks_and_is_aborted_no_longer_keeps_others_out() -> None:
    drive = driver(num_blocks=12, block_size=4, script=[7] * 30)
    drive.add("a", [1] * 28, max_tokens=12)
    drive.step()
    drive.add("b", [2] * 20, max_tokens=12)
    drive.add("c", [3], max_tokens=2)
    drive.step()
    assert (drive.engine.stats().waiting, drive.engine.room()) == (2, 0)
    drive.engine.abort("c")
    assert drive.engine.room() == 0
    drive.add("c", [3], max_tokens=2)
    drive.engine.abort("b")
    assert drive.engine.room() > 0  # c is not known to lack anything
    drive.run()
    drive.assert_as_alone()
    drive.assert_idle()


def test_a_stop_string_found_by_the_caller_ends_one_choice_and_spoils_no_later_answer() -> None:
    """After a batch that ended on a stop string, greedy answers to other prompts with the same head had changed."""
    head = [9] * 10
    drive = driver(block_size=4)
    for number in range(2):
        drive.add(f"stopped {number}", [*head, number], max_tokens=30, ignore_eos=True)
    for _ in range(4):
        drive.step()
    for number in range(2):
        drive.engine.finish(f"stopped {number}", 0)
        drive.engine.finish(f"stopped {number}", 0)
    drive.engine.finish("nobody", 3)
    drive.assert_idle()
    for number in range(4):
        drive.add(f"target {number}", [*head, *drive.tokens["stopped 0", 0][:number], number], max_tokens=12)
    drive.run()
    assert drive.outputs["target 3", 0][0].cached_tokens == 8
    drive.assert_as_alone()


def test_after_many_random_requests_nothing_of_any_is_left() -> None:
    """Per-request state that outlives its request is a leak, and so is a block."""
    rng = random.Random(7)
    drive = driver(num_blocks=48, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=60)
    engine, runner = drive.engine, drive.runner
    runner.keep_plans = False
    added = 0
    while added < 10_000 or engine.has_work:
        while added < 10_000 and engine.room():
            prompt = (*range(rng.randrange(9)), rng.randrange(200))
            options = SamplingOptions(
                max_tokens=rng.randint(1, 6), n=rng.choice((1, 1, 1, 2)), prompt_logprobs=rng.choice((None, 1))
            )
            salt = f"s{rng.randrange(500)}" if rng.random() < 0.5 else ""
            engine.add(Request(f"r{added}", prompt, options, priority=rng.randint(-1, 1), cache_salt=salt))
            added += 1
        engine.step()
        if rng.random() < 0.2:
            engine.abort(f"r{added - rng.randint(1, 8)}")
        if rng.random() < 0.1:
            engine.finish(f"r{added - rng.randint(1, 8)}", 0)
    drive.assert_idle()
    engine.check()
    cache = engine._blocks.cache
    assert cache is not None
    assert len(cache) <= 48
    assert len(cache._roots) <= 48


# -------------------------------------------------------------------------------------------------------- what it needs


def test_the_scripted_engine_starts_without_torch() -> None:
    code = (
        "import sys\n"
        "from headrace.engine import Engine, EngineConfig, Request\n"
        "from tests.support.scripted import ScriptedRunner\n"
        "engine = Engine(ScriptedRunner(), EngineConfig()); engine.add(Request('a', (1, 2, 3))); engine.step()\n"
        "heavy = {'torch', 'transformers', 'numpy', 'triton', 'redis'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import headrace.engine as package

    assert {"Engine", "Request", "load_engine"} <= set(dir(package))
    assert package.Engine is Engine
    with pytest.raises(AttributeError, match="nothing"):
        _ = package.nothing
