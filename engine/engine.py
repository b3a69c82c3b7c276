"""The engine: requests in, tokens out, one step at a time.

    add ──► line ──► running ──► ended          step = launch: plan (scheduler), begin (runner)
              ▲         │  finish, abort               + land: finish (runner), commit (here)
              └─────────┘  preempted

One thread calls everything here. Nothing of a request is kept once its last choice has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .flights import Flights, Landed
from .intake import Limits, check_request, sequences_of
from .make_blocks import make_blocks
from .prefix_cache import BlockHash, PrefixCache
from .scheduler import Scheduler
from .sequence import Sequence, State
from .stopping import finish_after_last
from .types import (
    ChoiceOutput,
    EngineConfig,
    EngineStats,
    Finish,
    Request,
    RequestRefusedError,
    RowResult,
    Runner,
    ScheduledRow,
    StepOutput,
    TokenLogprobs,
)

__all__ = ["Engine", "RequestRefusedError"]

_NUMERIC = Finish("error", error="numeric", message="the model gave a NaN or an infinity")
_INTERNAL = Finish("error", error="internal", message="the model gave no token")


@dataclass(slots=True)
class _Live:
    """A request that is not over: its choices that are not."""

    choices: dict[int, Sequence]
    first_scheduled_s: float = 0.0  # 0.0 until a step has computed for it


class Engine:
    """Runs requests on a runner, as many at once as there are places and blocks.

    `block_hash` replaces the prefix cache's hash, `clock` gives seconds; both are for tests.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig | None = None,
        *,
        block_hash: BlockHash | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config or EngineConfig()
        if config.max_num_seqs < 1 or config.max_num_batched_tokens < 1:
            raise ValueError("max_num_seqs and max_num_batched_tokens must be at least 1")
        self.runner = runner
        self.config = config
        self.max_model_len = min(config.max_model_len or runner.max_model_len, runner.max_model_len)
        self.step_count = 0  # steps that were run to their end
        cache = PrefixCache(runner.block_size, block_hash) if config.enable_prefix_caching else None
        self._blocks = make_blocks(runner, config, self.max_model_len, cache)
        self._scheduler = Scheduler(config, self._blocks)
        self._limits = Limits(
            runner.vocab_size, runner.eos_token_ids, self.max_model_len, self._blocks.most_blocks, runner.block_size
        )
        self._clock = clock
        self._flights = Flights(runner, self._scheduler, clock)
        self._live: dict[str, _Live] = {}
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is not over."""
        return bool(self._live)

    @property
    def requests(self) -> int:
        """Requests that are not over."""
        return len(self._live)

    def room(self) -> int:
        """Return how many further requests (of one choice) could run at once now; 0 while one waits for blocks."""
        return self._scheduler.room()

    def add(self, request: Request) -> None:
        """Take a request; `step` begins with it when there is room.

        Choices in `skip_choices`, and those whose settled tokens end them already (`stopping.finish_of`), are not run
        and give no output. Raises RequestRefusedError if it can never run here, and ValueError if its id is in use,
        `settled` or `skip_choices` do not fit `n`, or no choice is left to run.
        """
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id} is running already")
        check_request(request, self._limits)
        choices = sequences_of(request, self._limits, self._arrivals)
        self._arrivals += len(choices)
        self._live[request.request_id] = _Live({sequence.choice: sequence for sequence in choices})
        self._scheduler.add(choices)

    def abort(self, request_id: str) -> None:
        """End all choices of a request, whatever state they are in, without output. An unknown id is no error."""
        live = self._live.pop(request_id, None)
        if live is not None:
            for sequence in reversed(live.choices.values()):  # the leader last, or each in turn would take its place
                self._scheduler.end(sequence)

    def finish(self, request_id: str, choice: int) -> None:
        """End one choice without output: the caller found a stop string. An unknown id or choice is no error."""
        live = self._live.get(request_id)
        if live is not None and choice in live.choices:
            self._end(live, live.choices[choice])

    def step(self) -> StepOutput:
        """Compute one step and return what it gave; empty, without calling the runner, if nothing can run.

        What the runner raises comes through, and nothing has happened: the next call computes the same tokens again.
        """
        self.launch()
        return self.land()

    def launch(self) -> bool:
        """Begin a step; False if nothing can run. Raises as `step` does, and RuntimeError if one is in flight.

        Until `land`, whatever else is called here is no part of this step: what is added comes into the next one, and
        what a sequence that ends meanwhile would have given is thrown away. With a runner that can begin a step before
        the one before has given its tokens (`types.Overlapper`), two are in flight from now on, if there is work.
        """
        return self._flights.launch()

    def land(self) -> StepOutput:
        """Wait for the oldest step in flight and return what it gave; empty if there is none. Raises as `step` does."""
        landed = self._flights.land()
        if landed is None:
            return StepOutput(self.step_count, (), ())
        plan = landed.plan
        outputs = self._commit(landed)
        self._scheduler.retire(plan.step)
        self.step_count += 1
        if not self._live:
            self._flights.cancel()  # nobody is left who would want what the next one gives
        return StepOutput(plan.step, tuple(outputs), plan.rows)

    def stats(self) -> EngineStats:
        """Return a snapshot."""
        blocks = self._blocks
        pool = blocks.pools[0 if self.runner.num_blocks else 1]
        return EngineStats(
            step=self.step_count,
            running=len(self._scheduler.running),
            waiting=self._scheduler.num_waiting,
            free_blocks=pool.num_free,
            total_blocks=pool.num_blocks,
            cached_blocks=pool.num_findable,
            prefix_queries=blocks.prefix_queries,
            prefix_hits=blocks.prefix_hits,
            preemptions=self._scheduler.num_preemptions,
        )

    def free_block_ids(self, *, windowed: bool = False) -> frozenset[int]:
        """Return the blocks whose content nobody may ever read: held by nobody, unknown to the prefix cache."""
        return self._blocks.pools[windowed].blank_block_ids()

    def check(self) -> None:
        """Prove that nothing is lost, held twice or left over: walks everything. Raises RuntimeError."""
        self._scheduler.check()
        known = {id(sequence) for live in self._live.values() for sequence in live.choices.values()}
        held = {id(sequence) for sequence in self._scheduler.sequences()}
        if known != held:
            raise RuntimeError(f"the engine knows {len(known)} choices, the scheduler {len(held)}")
        if not all(live.choices for live in self._live.values()):
            raise RuntimeError("a request without open choices is kept")

    def _commit(self, landed: Landed) -> list[ChoiceOutput]:
        outputs: list[ChoiceOutput] = []
        running, commit = State.RUNNING, self._scheduler.commit  # looked up once: this runs for every token
        for row, result in zip(landed.plan.rows, landed.results, strict=True):
            sequence = row.sequence
            if sequence.state is not running:
                continue  # it ended while its step was in flight: the token is discarded
            live = self._live[sequence.request_id]
            if live.first_scheduled_s == 0.0:
                live.first_scheduled_s = landed.started_s
            token_id = result.token_id
            if not result.finite:
                outputs.append(self._fail(live, sequence, _NUMERIC))
            elif token_id is None and row.samples:
                outputs.append(self._fail(live, sequence, _INTERNAL))
            else:
                if sequence.prompt_logprobs is not None:
                    _gather(sequence, row, result)
                commit(row)
                if token_id is not None:
                    outputs.append(self._append(live, sequence, token_id, result.logprobs))
        return outputs

    def _append(self, live: _Live, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> ChoiceOutput:
        token_ids = sequence.token_ids
        index = len(token_ids) - sequence.num_prompt_tokens
        token_ids.append(token_id)
        finish = finish_after_last(sequence)
        prompt_logprobs = None
        if sequence.prompt_logprobs is not None:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
            sequence.prompt_logprobs = None
        if finish is not None:
            self._end(live, sequence)
        return ChoiceOutput(
            sequence.request_id,
            sequence.choice,
            index,
            (token_id,),
            () if logprobs is None else (logprobs,),
            prompt_logprobs,
            finish,
            sequence.num_cached_tokens,
            live.first_scheduled_s,
        )

    def _fail(self, live: _Live, sequence: Sequence, finish: Finish) -> ChoiceOutput:
        self._end(live, sequence)
        return ChoiceOutput(
            sequence.request_id,
            sequence.choice,
            sequence.num_output_tokens,
            (),
            finish=finish,
            cached_tokens=sequence.num_cached_tokens,
            first_scheduled_s=live.first_scheduled_s,
        )

    def _end(self, live: _Live, sequence: Sequence) -> None:
        del live.choices[sequence.choice]
        if not live.choices:
            del self._live[sequence.request_id]
        self._scheduler.end(sequence)


def _gather(sequence: Sequence, row: ScheduledRow, result: RowResult) -> None:
    """Keep the row's prompt log-probabilities that are new: after a preemption, positions are computed once more.

    gathered  [ 0 … len - 1 ]           row gives  [ start + 1 … start + len(result.prompt_logprobs) ]
    """
    gathered = sequence.prompt_logprobs
    if gathered is not None and len(gathered) < sequence.num_prompt_tokens:
        gathered.extend(result.prompt_logprobs[max(0, len(gathered) - row.start - 1) :])
