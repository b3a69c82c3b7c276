"""A scripted run of the real engine on the Triton kernels, of which only the launches are real.

Under `fake_gpu` nothing is computed, so each operation is launched as it is and its result then filled with zeros, or,
for drawn tokens, with numbers from a seeded generator. Schedule, shapes and addresses are those of a real run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from headrace.engine.config import read_model_config
from headrace.engine.engine import Engine
from headrace.engine.load import load_runner
from headrace.engine.types import EngineConfig, Plan, Request, SamplingOptions
from headrace.kernels.backend import Backend
from headrace.kernels.gpu.ops import triton_backend
from headrace.kernels.linear import any_rows
from tests.support.checkpoints import Shape, checkpoint
from tests.support.fake_gpu import Compiled, fake_gpu
from tests.support.families import family_checkpoint

CAPABILITY = 90
STEPS, WARM_UP = 200, 100
VOCAB = 320
KINDS = 7  # of options
SHARED_LEN = 264  # a split of 256 positions and something
BUSY = (1, 1, 8, 10, 8, 4, 10, 1, 8, 2)  # choices that are wanted at a time, each for 20 steps
CONFIG = EngineConfig(max_num_seqs=12, max_num_batched_tokens=96, block_size=16, num_kv_blocks=40, max_model_len=512)


@dataclass(frozen=True, slots=True)
class Script:
    """A model, and the type of its cache."""

    folder: Callable[[], Path]
    kv_cache_dtype: str = "auto"


SCRIPTS = {
    "plain": Script(lambda: checkpoint(Shape(dtype="bfloat16"))),
    "windows": Script(lambda: family_checkpoint("gemma2"), "int8"),
}


@dataclass(slots=True)
class Played:
    """What a run came to."""

    binaries: int  # different ones, over the whole run
    launches: int
    late: list[str]  # kernels of binaries that first appeared after the warm-up, with the step
    kernels: list[str]
    steps: int
    preemptions: int
    copies: int  # of blocks
    mixed: int  # steps with decodes beside prompts
    chunks: int  # rows of prompts that did not reach the prompt's end
    shared: int  # launches for prefixes that several sequences share


@dataclass(slots=True)
class _Watch:
    """Counts what plans have."""

    copies: int = 0
    mixed: int = 0
    chunks: int = 0

    def see(self, plan: Plan) -> None:
        one = [row.num_tokens == 1 for row in plan.rows]
        self.mixed += any(one) and not all(one)
        self.chunks += sum(row.num_tokens > 1 and not row.samples for row in plan.rows)
        self.copies += len(plan.copies) + len(plan.window_copies)


@dataclass(slots=True)
class _Play:
    """Requests as they come."""

    engine: Engine
    random: random.Random = field(default_factory=lambda: random.Random(11))
    added: int = 0
    open: Counter[str] = field(default_factory=Counter[str])  # choices on their way, of each request

    def options(self) -> SamplingOptions:
        """The next request's: each kind in turn, so that the warm-up has all of them."""
        draw, number = self.random, self.added
        most = 3 if number < KINDS else draw.randint(3, 60)  # at first each alone, so that each is met without others
        base = SamplingOptions(max_tokens=most, ignore_eos=True, seed=number)
        kinds = (
            replace(base, temperature=0.0),
            base,
            replace(base, top_k=20, top_p=0.9),
            replace(base, n=3, temperature=0.7),
            replace(base, min_p=0.05, repetition_penalty=1.1, logit_bias={5: 1.0}),
            replace(base, temperature=0.0, logprobs=3, presence_penalty=0.5, frequency_penalty=0.1),
            replace(base, temperature=0.0, prompt_logprobs=1, min_tokens=2),
        )
        return kinds[number % KINDS]

    def prompt(self) -> tuple[int, ...]:
        """Short, long enough for chunks, or one of two prefixes with something behind."""
        draw = self.random

        def ids(count: int) -> list[int]:
            return [draw.randint(2, VOCAB - 1) for _ in range(count)]

        kind = (self.added - KINDS) % 5 if self.added >= KINDS else 4
        if kind in {0, 1}:
            prefix = random.Random(self.added % 2)
            return (*(prefix.randint(2, VOCAB - 1) for _ in range(SHARED_LEN)), *ids(draw.randint(1, 30)))
        return tuple(ids(draw.randint(100, 300) if kind == 2 else draw.randint(1, 40)))

    def fill(self, wanted: int) -> None:
        """Add requests until so many choices are on their way; now and then take one away."""
        while self.open.total() < wanted:
            request = Request(str(self.added), self.prompt(), self.options(), priority=-(self.added % 3 == 2))
            self.engine.add(request)
            self.open[request.request_id] = request.options.n
            self.added += 1
        if self.random.random() < 0.03:
            gone = self.random.choice(sorted(self.open))
            self.engine.abort(gone)
            del self.open[gone]

    def step(self) -> None:
        for output in self.engine.step().outputs:
            if output.finish is not None:
                self.open[output.request_id] -= 1
        self.open = +self.open
        self.engine.check()


def hollow(ops: Backend, vocab: int) -> Backend:
    """The same operations, whose results are harmless instead of what nobody has computed."""
    tokens = torch.Generator().manual_seed(3)

    def filled(operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def run(*args: Any, **options: Any) -> Any:
            result = operation(*args, **options)
            for each in result if isinstance(result, tuple) else (result,):
                each.zero_()
            return result

        return run

    def sample(*args: Any) -> torch.Tensor:
        return ops.sample(*args).random_(2, vocab, generator=tokens)

    names = ("paged_attention", "rms_norm", "add_rms_norm", "rotate_and_store", "silu_mul", "gelu_mul", "logprobs")
    replaced = {name: filled(getattr(ops, name)) for name in names}
    return replace(ops, sample=sample, row_multiple=any_rows, **replaced)


def play(script: Script, steps: int = STEPS, warm_up: int = WARM_UP) -> Played:
    """Run the script, and tell what was compiled for it."""
    folder = script.folder()
    config = replace(CONFIG, kv_cache_dtype=script.kv_cache_dtype)
    with fake_gpu(CAPABILITY) as seen:
        ops = hollow(triton_backend(CAPABILITY), VOCAB)
        runner = load_runner(folder, read_model_config(folder), config, torch.bfloat16, ops)
        engine, watch = Engine(runner, config), _Watch()
        launch = runner.launch
        runner.launch = lambda plan: (watch.see(plan), launch(plan))[1]  # type: ignore[method-assign]
        playing, warm = _Play(engine), 0
        late: list[str] = []
        known: set[str] = set()
        for step in range(steps):
            playing.fill(BUSY[step // 20 % len(BUSY)])
            playing.step()
            fresh = [one for one in seen[warm:] if one.binary not in known]
            warm = len(seen)
            known |= {one.binary for one in fresh}
            late += [f"{one.kernel} in step {step}" for one in fresh if step >= warm_up]
        return _played(seen, engine, watch, late, steps)


def _played(seen: list[Compiled], engine: Engine, watch: _Watch, late: list[str], steps: int) -> Played:
    kernels = sorted({one.kernel for one in seen})
    return Played(
        binaries=len({one.binary for one in seen}),
        launches=len(seen),
        late=late,
        kernels=kernels,
        steps=steps,
        preemptions=engine.stats().preemptions,
        copies=watch.copies,
        mixed=watch.mixed,
        chunks=watch.chunks,
        shared=sum(one.kernel == "_shared_prefix" for one in seen),
    )
