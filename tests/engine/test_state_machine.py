"""Whatever is added, stepped, aborted and finished in whatever order: the books add up and every output is as alone.

Pools are tiny, so that blocks run out all the time; prompts share beginnings, salts separate them, priorities mix, a
request has up to three choices, the runner fails now and then. The scripted runner checks each context that is read.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.prefix_cache import BlockHash
from headrace.engine.types import EngineConfig, RequestRefusedError
from tests.support.driver import Driver
from tests.support.overlapping import LateRunner, OverlappingRunner
from tests.support.scripted import LaunchingRunner, ScriptedRunner, expected_output

PROMPTS = st.builds(
    lambda shared, own: [*range(1, 1 + shared), *own] or [0],
    st.integers(0, 12),
    st.lists(st.integers(0, 12), max_size=3),
)
# The largest window (0: none), blocks of the layers with one, whether that is all layers
WINDOWS = st.one_of(st.just((0, 0, False)), st.tuples(st.integers(1, 16), st.integers(2, 10), st.booleans()))


class EngineMachine(RuleBasedStateMachine):
    """Rules over one engine; `block_hash` is what the cache hashes with."""

    block_hash: BlockHash | None = None

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([1, 2, 4]),
        seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        caching=st.booleans(),
        kind=st.sampled_from([ScriptedRunner, LaunchingRunner, OverlappingRunner, LateRunner]),
        windowed=WINDOWS,
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        seqs: int,
        budget: int,
        caching: bool,
        kind: type[ScriptedRunner],
        windowed: tuple[int, int, bool],
    ) -> None:
        window, num_window_blocks, every_layer = windowed
        runner = kind(
            num_blocks=0 if every_layer else num_blocks, block_size=block_size, window=window,
            num_window_blocks=num_window_blocks, max_model_len=24, vocab_size=40, eos_token_ids=frozenset({13}),
            eos_every=9, nan_token_id=39,
        )  # fmt: skip
        has_all = num_window_blocks * block_size >= window + 2 * block_size  # of what a text of any length sees
        tables = [num_blocks] * (not every_layer) + [num_window_blocks] * (window > 0 and not has_all)
        self.most_blocks = min(tables, default=24)
        config = EngineConfig(seqs, budget, enable_prefix_caching=caching)
        self.drive = Driver(runner, config, type(self).block_hash)
        self.ended_by_us: set[tuple[str, int]] = set()

    @rule(
        prompt=PROMPTS,
        options=st.fixed_dictionaries(
            {
                "n": st.integers(1, 3),
                "max_tokens": st.integers(1, 12),
                "min_tokens": st.integers(0, 3),
                "temperature": st.sampled_from([0.0, 1.0]),
                "ignore_eos": st.booleans(),
                "prompt_logprobs": st.sampled_from([None, None, 1]),
                "cache_salt": st.sampled_from(["", "", "X"]),
                "priority": st.integers(-1, 1),
            }
        ),
        settled=st.lists(st.integers(14, 20), max_size=3),
    )
    def add(self, prompt: list[int], options: dict[str, Any], settled: list[int]) -> None:
        drive, most = self.drive, min(options["max_tokens"], 24 - len(prompt))
        settled_tokens = tuple(tuple(settled[: choice + 1]) for choice in range(options["n"]))
        try:
            drive.add(f"r{len(drive.requests)}", prompt, settled=settled_tokens, **options)
        except RequestRefusedError as refusal:
            assert refusal.code == "kv_capacity"
            assert len(prompt) + most > self.most_blocks * drive.runner.block_size
        except ValueError:
            assert all(len(each) >= most for each in settled_tokens)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        self.drive.land()
        for _ in range(count):
            self.drive.step()

    @rule()
    def launch(self) -> None:
        self.drive.land()
        self.drive.launch()

    @rule()
    def land(self) -> None:
        self.drive.land()

    @rule()
    def step_that_fails(self) -> None:
        self.drive.land()
        runner = self.drive.runner
        runner.fail_steps = range(10**9)
        try:
            for _ in range(3):  # where steps overlap, one may have been computed already
                self.drive.step()
            assert not self.drive.engine.has_work
        except RuntimeError as error:
            assert "scripted failure" in str(error)
        finally:
            runner.fail_steps = ()

    @precondition(lambda self: self.drive.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.drive.requests)))
        self.drive.engine.abort(name)
        self.ended_by_us |= {(name, choice) for choice in range(3)}

    @precondition(lambda self: self.drive.requests)
    @rule(data=st.data(), choice=st.integers(0, 2))
    def finish(self, data: st.DataObject, choice: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.drive.requests)))
        self.drive.engine.finish(name, choice)
        self.ended_by_us.add((name, choice))

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "drive"):
            return
        engine, config = self.drive.engine, self.drive.config
        engine.check()
        stats = engine.stats()
        assert 0 <= engine.room() <= config.max_num_seqs - stats.running
        assert engine.has_work == (stats.running + stats.waiting > 0) == (engine.requests > 0)

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        drive = self.drive
        drive.land()
        drive.run(max_steps=3000)
        drive.assert_idle()
        for name, request in drive.requests.items():
            for choice in range(request.options.n):
                key = (name, choice)
                settled = request.settled[choice] if request.settled else ()
                try:
                    wanted, finish = expected_output(drive.runner, request, choice)
                except KeyError:  # its settled tokens had ended it
                    assert key not in drive.tokens
                    continue
                got = drive.tokens.get(key, [])
                if key in drive.finishes:
                    assert (got, drive.finishes[key].reason) == (wanted, finish and finish.reason)
                else:
                    assert key in self.ended_by_us
                    assert got == wanted[: len(got)]
                asked = request.options.prompt_logprobs is not None and choice == 0 and not settled
                given = [one.prompt_logprobs for one in drive.outputs.get(key, []) if one.prompt_logprobs is not None]
                if asked and got:
                    assert [len(each) for each in given] == [len(request.prompt_token_ids)]
                else:
                    assert not given


class CollidingMachine(EngineMachine):
    """The same with a hash under which everything collides."""

    block_hash = staticmethod(lambda _: b"")


COMMON = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = COMMON
TestCollidingMachine = CollidingMachine.TestCase
TestCollidingMachine.settings = COMMON
