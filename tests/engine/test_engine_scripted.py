"""The engine as its callers see it: what it takes, what it gives, what is left afterwards."""

from __future__ import annotations

import pytest

from headrace.engine.engine import Engine
from headrace.engine.types import EngineConfig, Request, RequestRefusedError, SamplingOptions
from tests.support.driver import Driver, driver
from tests.support.scripted import ScriptedRunner

EOS = 257


# -------------------------------------------------------------------------------------------------------- what it takes


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ([], {}, "prompt"),
        ([1, 260], {}, "prompt_token_ids"),
        ([-1], {}, "prompt_token_ids"),
        ([1], {"stop_token_ids": (151645,)}, "stop_token_ids"),
        ([1], {"logit_bias": {5: 1.0, 260: 1.0}}, "logit_bias"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"n": 0}, "n"),
    ],
)
def test_ids_outside_the_vocabulary_and_empty_requests_are_refused_by_name(
    prompt: list[int], options: dict[str, object], param: str
) -> None:
    """A stop token of a larger vocabulary killed the whole engine."""
    drive = driver()
    with pytest.raises(RequestRefusedError) as refusal:
        drive.add("a", prompt, **options)
    assert (refusal.value.code, refusal.value.param) == ("invalid_request", param)
    drive.assert_idle()
    drive.add("a", [1])
    drive.run()
    drive.assert_as_alone()


@pytest.mark.parametrize(("length", "refused"), [(31, False), (32, True), (33, True)])
def test_a_prompt_that_leaves_no_room_for_a_token_is_too_long(length: int, refused: bool) -> None:
    drive = driver(max_model_len=32)
    if refused:
        with pytest.raises(RequestRefusedError) as refusal:
            drive.add("a", length)
        assert refusal.value.code == "prompt_too_long"
    else:
        drive.add("a", length, ignore_eos=True)
        drive.run()
        assert (len(drive.tokens["a", 0]), drive.finishes["a", 0].reason) == (1, "length")


def test_the_configured_length_binds_if_it_is_smaller_than_the_models() -> None:
    engine = Engine(ScriptedRunner(max_model_len=100), EngineConfig(max_model_len=20))
    assert engine.max_model_len == 20
    assert Engine(ScriptedRunner(max_model_len=10), EngineConfig(max_model_len=20)).max_model_len == 10


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    drive = driver(script=[])
    drive.add("a", [1])
    with pytest.raises(ValueError, match="running already"):
        drive.engine.add(Request("a", (2,)))
    drive.run()
    drive.finishes.clear()
    drive.tokens.clear()
    drive.add("a", [1])
    drive.run()


@pytest.mark.parametrize(
    "fields", [{"settled": ((1,),)}, {"settled": ((1,), (2,), (3,))}, {"skip_choices": frozenset({2})}]
)
def test_settled_tokens_and_skipped_choices_must_fit_n(fields: dict[str, object]) -> None:
    drive = driver()
    with pytest.raises(ValueError, match="n"):
        drive.add("a", [1], n=2, **fields)
    drive.assert_idle()


@pytest.mark.parametrize("config", [EngineConfig(max_num_seqs=0), EngineConfig(max_num_batched_tokens=0)])
def test_an_engine_that_could_never_run_anything_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Engine(ScriptedRunner(), config)


# -------------------------------------------------------------------------------------------------------- what it gives


def test_every_token_comes_once_with_its_index_and_the_last_with_its_end() -> None:
    drive = driver(script=[7, 8])
    drive.add("a", [1, 2])
    drive.run()
    given = [
        (one.index, one.token_ids, one.finish and (one.finish.reason, one.finish.stop)) for one in drive.outputs["a", 0]
    ]
    assert given == [(0, (7,), None), (1, (8,), None), (2, (EOS,), ("stop", EOS))]


def test_the_output_that_reaches_max_tokens_ends_with_length() -> None:
    """The reason used to be "stop" always."""
    drive = driver(script=[7] * 9)
    drive.add("a", [1], max_tokens=3)
    drive.run()
    assert (drive.tokens["a", 0], drive.finishes["a", 0].reason) == ([7, 7, 7], "length")


def test_ignore_eos_ignores_every_eos_of_the_model_but_no_stop_token() -> None:
    """A list of EOS ids in the generation configuration defeated it."""
    drive = driver(script=[7, 250, 257, 8, 9, 10], eos_token_ids=frozenset({250, 257}))
    drive.add("all", [1], max_tokens=5, ignore_eos=True)
    drive.add("own", [2], max_tokens=5, ignore_eos=True, stop_token_ids=(8, 257))
    drive.add("eos", [3], max_tokens=5)
    drive.run()
    assert (drive.tokens["all", 0], drive.finishes["all", 0].reason) == ([7, 250, 257, 8, 9], "length")
    assert (drive.tokens["own", 0], drive.finishes["own", 0].stop) == ([7, 250, 257], 257)
    assert (drive.tokens["eos", 0], drive.finishes["eos", 0].stop) == ([7, 250], 250)


def test_settled_tokens_count_for_min_and_max_tokens() -> None:
    """Token budgets were not carried over to the attempt that went on: 100 at most, no end before 80, crash at 60."""
    settled = tuple([5] * 60)
    drive = driver(num_blocks=200, script=[5] * 60 + [EOS] * 60)
    drive.add("a", [1], max_tokens=100, min_tokens=80, settled=(settled,))
    drive.run()
    assert len(drive.tokens["a", 0]) == 21
    assert EOS not in drive.tokens["a", 0][:20]
    assert drive.finishes["a", 0].stop == EOS
    assert drive.outputs["a", 0][0].index == 60


def test_token_limits_may_be_as_large_as_integers_get() -> None:
    drive = driver(max_model_len=40, script=[5] * 99)
    drive.add("a", [1], max_tokens=2**32 - 1, min_tokens=2**32 - 1)
    drive.run()
    assert (len(drive.tokens["a", 0]), drive.finishes["a", 0].reason) == (39, "length")


def test_log_probabilities_come_with_each_token() -> None:
    drive = driver()
    drive.add("a", [1, 2], logprobs=2, max_tokens=4, ignore_eos=True)
    drive.add("b", [1, 3], max_tokens=4, ignore_eos=True)
    drive.run()
    for one in drive.outputs["a", 0]:
        ((chosen, *best),) = one.logprobs
        assert chosen[0] == one.token_ids[0]
        assert len(best) == 2
    assert all(one.logprobs == () for one in drive.outputs["b", 0])


@pytest.mark.parametrize("prompt", [1, 2, 5, 9, 17])
@pytest.mark.parametrize("budget", [1, 4, 64])
def test_prompt_log_probabilities_come_once_whatever_the_chunks(prompt: int, budget: int) -> None:
    """A prompt of two chunks and a token crashed; one value per token, the first without."""
    drive = driver(max_num_batched_tokens=budget)
    whole = driver()
    for each in (drive, whole):
        each.add("a", prompt, prompt_logprobs=1, n=2, max_tokens=3, ignore_eos=True)
        each.run()
    first, *others = drive.outputs["a", 0]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs == whole.outputs["a", 0][0].prompt_logprobs
    assert len(first.prompt_logprobs) == prompt
    assert first.prompt_logprobs[0] is None
    assert [entry[0][0] for entry in first.prompt_logprobs[1:] if entry] == list(range(1, prompt))
    assert all(one.prompt_logprobs is None for one in (*others, *drive.outputs["a", 1]))


def test_prompt_log_probabilities_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    drive = driver(num_blocks=10, block_size=4, max_num_batched_tokens=4, caching=False)
    drive.add("b", [5] * 19, prompt_logprobs=0, max_tokens=2)
    drive.step()
    drive.step()
    scheduler = drive.engine._scheduler
    scheduler._preempt(scheduler_draft(drive), drive.sequence("b"))
    drive.run()
    given = drive.outputs["b", 0][0].prompt_logprobs
    alone = driver()
    alone.add("b", [5] * 19, prompt_logprobs=0, max_tokens=2)
    alone.run()
    assert given == alone.outputs["b", 0][0].prompt_logprobs


def scheduler_draft(drive: Driver) -> object:
    """A plan in the making with nothing in it."""
    from headrace.engine.scheduler import _Draft

    return _Draft(drive.engine._scheduler._step + 1, 4)


def test_prompt_log_probabilities_of_an_earlier_attempt_are_not_given_again() -> None:
    drive = driver()
    drive.add("a", 9, prompt_logprobs=1, settled=((7,),), max_tokens=3)
    drive.add("b", 9, prompt_logprobs=1, n=2, skip_choices=frozenset({0}), max_tokens=3)
    drive.run()
    given = [one for outputs in drive.outputs.values() for one in outputs]
    assert given
    assert all(one.prompt_logprobs is None for one in given)


def test_the_time_of_the_first_step_is_told() -> None:
    times = iter(range(100, 200))
    engine = Engine(ScriptedRunner(script=[1] * 9), EngineConfig(max_num_batched_tokens=4), clock=lambda: next(times))
    engine.add(Request("a", tuple(range(10)), SamplingOptions(max_tokens=3)))
    outputs = [one for _ in range(5) for one in engine.step().outputs]
    assert [one.first_scheduled_s for one in outputs] == [100, 100, 100]


def test_what_ran_is_told_for_each_step() -> None:
    drive = driver(max_num_batched_tokens=4)
    drive.add("a", 6)
    assert drive.step().scheduled == (("a", 0, 4),)
    drive.add("b", [9])
    assert drive.step().scheduled == (("a", 0, 2), ("b", 0, 1))


def test_nothing_to_do_gives_an_empty_step_without_calling_the_runner() -> None:
    drive = driver()
    output = drive.engine.step()
    assert (output.outputs, output.scheduled, drive.engine.step_count) == ((), (), 0)
    assert not drive.engine.has_work
    assert drive.runner.plans == []


# ------------------------------------------------------------------------------------------------------------- its room


def test_room_counts_every_choice_that_runs_or_waits() -> None:
    drive = driver(max_num_seqs=5)
    assert drive.engine.room() == 5
    drive.add("a", [1], n=3, temperature=1, ignore_eos=True)
    assert drive.engine.room() == 2
    drive.step()
    assert drive.engine.room() == 2
    drive.add("b", [2])
    drive.add("c", [3])
    drive.add("d", [4])
    assert drive.engine.room() == 0  # never below
    drive.engine.abort("a")
    assert drive.engine.room() == 2
    drive.run()
    assert drive.engine.room() == 5


def test_there_is_no_room_while_one_waits_for_blocks() -> None:
    drive = driver(num_blocks=10, block_size=4, max_num_seqs=8)
    drive.add("a", [1] * 28, max_tokens=12, ignore_eos=True)
    drive.step()
    assert drive.engine.room() == 2  # three blocks are free, of which it will want one
    drive.add("b", [2] * 20, max_tokens=12, ignore_eos=True)
    drive.step()
    assert (drive.engine.stats().waiting, drive.engine.room()) == (1, 0)
    drive.engine.abort("b")
    assert drive.engine.room() > 0
    drive.run()
    assert drive.engine.room() == 8


def test_there_is_room_again_once_who_waited_for_blocks_has_them() -> None:
    drive = driver(num_blocks=10, block_size=4, max_num_seqs=8)
    drive.add("a", [1] * 28, max_tokens=3, ignore_eos=True)
    drive.step()
    drive.add("b", [2] * 20, max_tokens=12, ignore_eos=True)
    drive.step()
    assert drive.engine.room() == 0
    while drive.engine.stats().waiting:
        drive.step()
    drive.add("c", [3])
    assert drive.engine.room() == 4  # of five free blocks b will want one; c, which nobody has tried, is not in want


def test_there_is_no_room_while_one_waits_for_its_return() -> None:
    drive = driver(num_blocks=6, block_size=4)
    drive.add("a", [1] * 6, max_tokens=16, ignore_eos=True)
    drive.add("b", [2] * 6, max_tokens=16, ignore_eos=True)
    while drive.engine.stats().preemptions == 0:
        drive.step()
    assert drive.engine.room() == 0
    drive.run()
    drive.assert_as_alone()
