"""Drives an engine on the scripted runner, step by step, and watches everything that must always hold.

After each step: the books add up (`Engine.check`), blocks that nobody may read are poisoned, token indices go on
without gap or repeat, and as long as there is work something was computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.engine import Engine
from headrace.engine.prefix_cache import BlockHash
from headrace.engine.sequence import Sequence
from headrace.engine.types import ChoiceOutput, EngineConfig, Finish, Overlapper, Request, SamplingOptions, StepOutput

from .scripted import ScriptedRunner, expected_output

Key = tuple[str, int]  # request id, choice


@dataclass
class Driver:
    """`engine` on `runner`; `tokens` and `finishes` collect what came out, per (request id, choice)."""

    runner: ScriptedRunner
    config: EngineConfig
    block_hash: BlockHash | None = None
    requests: dict[str, Request] = field(default_factory=dict)
    tokens: dict[Key, list[int]] = field(default_factory=dict)
    finishes: dict[Key, Finish] = field(default_factory=dict)
    outputs: dict[Key, list[ChoiceOutput]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner.keep_plans = True
        self.runner.max_num_batched_tokens = self.config.max_num_batched_tokens
        self.engine = Engine(self.runner, self.config, block_hash=self.block_hash)

    def add(self, request_id: str, prompt: list[int] | int, **fields: object) -> Request:
        """Add a request; an int as prompt makes that many tokens, the same each time. Greedy, 20 tokens if not said."""
        ids = prompt if isinstance(prompt, list) else [index % 200 for index in range(prompt)]
        of_request = {name: fields.pop(name) for name in list(fields) if name in Request.__dataclass_fields__}
        options = SamplingOptions(**{"temperature": 0, "max_tokens": 20, **fields})  # type: ignore[arg-type]
        request = Request(request_id, tuple(ids), options, **of_request)  # type: ignore[arg-type]
        self.engine.add(request)
        self.requests[request_id] = request
        return request

    def step(self) -> StepOutput:
        """Run one step and look at everything."""
        had_work = self.engine.has_work
        output = self.engine.step()
        assert bool(output.scheduled) == had_work or self._left_over(had_work), "a step computes if there is work"
        return self._look(output)

    def launch(self) -> None:
        """Begin a step; `land` ends it. What is free now is nobody's, also while the step computes."""
        had_work = self.engine.has_work
        launched = self.engine.launch()
        assert launched == had_work or self._left_over(had_work)
        self.engine.check()
        self._poison()

    def _left_over(self, had_work: bool) -> bool:
        """Where steps overlap, one may be in flight of which nobody is left."""
        return not had_work and isinstance(self.runner, Overlapper)

    def land(self) -> StepOutput:
        """End the step in flight and look at everything."""
        return self._look(self.engine.land())

    def _look(self, output: StepOutput) -> StepOutput:
        self.engine.check()
        self._poison()
        for one in output.outputs:
            key = (one.request_id, one.choice)
            settled = self.requests[one.request_id].settled
            known = self.tokens.setdefault(key, [])
            assert key not in self.finishes, f"{key} goes on after its end"
            assert one.index == len(known) + (len(settled[one.choice]) if settled else 0)
            known += one.token_ids
            self.outputs.setdefault(key, []).append(one)
            if one.finish is not None:
                self.finishes[key] = one.finish
        return output

    def _poison(self) -> None:
        self.runner.poison(self.engine.free_block_ids())
        if self.runner.window:
            self.runner.poison(self.engine.free_block_ids(windowed=True), windowed=True)

    def run(self, max_steps: int = 5000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps: {self.engine.stats()}")

    def sequence(self, request_id: str, choice: int = 0) -> Sequence:
        """Return the live sequence of a choice."""
        return self.engine._live[request_id].choices[choice]

    def plan(self) -> dict[Key, tuple[int, int]]:
        """Return the rows of the newest step that ran: (start, number of tokens) per choice, in order."""
        return {(request_id, choice): (start, count) for request_id, choice, start, count in self.runner.plans[-1]}

    def assert_as_alone(self) -> None:
        """Every choice that ended by itself gave exactly what it gives without neighbours, cache or preemption."""
        for (request_id, choice), finish in self.finishes.items():
            wanted = expected_output(self.runner, self.requests[request_id], choice)
            got = (self.tokens[request_id, choice], finish)
            assert got[0] == wanted[0], f"{request_id}/{choice}: {got[0]} instead of {wanted[0]}"
            assert (got[1].reason, got[1].stop) == (wanted[1].reason, wanted[1].stop)

    def assert_idle(self) -> None:
        """Nothing is left of any request."""
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, self.engine.requests) == (0, 0, 0)
        assert stats.free_blocks == stats.total_blocks
        scheduler, pools = self.engine._scheduler, self.engine._blocks.pools
        assert not list(scheduler.sequences())
        assert all(pool.num_free == pool.num_blocks for pool in pools)
        pending = [pool._pending for pool in pools if pool._pending]
        left_over = (scheduler._flying, scheduler.line._lines, scheduler.line.led, pending)
        assert not any(left_over), left_over
        assert scheduler._lacking is None


def driver(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    *,
    caching: bool = True,
    block_hash: BlockHash | None = None,
    **runner: object,
) -> Driver:
    """Make a driver; `runner` are fields of ScriptedRunner."""
    fields = {"max_model_len": 10_000, "vocab_size": 260, **runner}
    scripted = ScriptedRunner(num_blocks=num_blocks, block_size=block_size, **fields)  # type: ignore[arg-type]
    config = EngineConfig(max_num_seqs, max_num_batched_tokens, enable_prefix_caching=caching)
    return Driver(scripted, config, block_hash)
