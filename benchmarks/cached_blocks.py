"""Whether a full prefix cache slows a step: the same requests on an engine with a full cache and with an empty one.

    python -m benchmarks.cached_blocks --model DIR --blocks 100000 [--rounds 5]

Both engines have the same number of blocks. One has its cache filled first, by requests whose prompts are planned,
hashed and committed as always, but not computed: only what the cache knows matters here, not what the model would have
written.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.types import EngineConfig, Plan, RowResult, Runner

from .offline import open_engine, run_offline
from .pairs import Comparison, Cost, alternate, compare
from .processes import fresh, print_result
from .sections import Claim, Line, Plot, Section, Table
from .settings import Say, Settings
from .workloads import mixed, uniform, warm_up

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

COUNTS = (10_000, 100_000)
QUICK_COUNTS = (2_000,)
MOST_RATIO = 1.05
_BLOCK = 16
_PROMPT_BLOCKS = 500  # of each request that fills the cache
_LEFT = 4096  # blocks beyond the cached ones


@dataclass(frozen=True, slots=True)
class CachedRun:
    """What a step took on the full and on the empty one, for each round."""

    blocks: int  # cached in the full one, just before it was measured
    # Of each round: full, empty; each is the median ms of a step, and CPU ms for each step, all threads.
    steps: list[list[list[float]]]


class Skipping:
    """Implements `types.Runner`: passes plans on, except while `skips`: then every row gives the same id at once."""

    def __init__(self, inner: Runner) -> None:
        self.vocab_size = inner.vocab_size
        self.eos_token_ids = inner.eos_token_ids
        self.max_model_len = inner.max_model_len
        self.num_blocks = inner.num_blocks
        self.block_size = inner.block_size
        self.window = inner.window
        self.num_window_blocks = inner.num_window_blocks
        self.skips = False
        self._inner = inner

    def run(self, plan: Plan) -> list[RowResult]:
        """Compute, or do not."""
        if self.skips:
            return [RowResult(5 if row.samples else None) for row in plan.rows]
        return self._inner.run(plan)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cached_blocks")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--blocks", type=int, required=True, help="blocks to have in the cache")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    full, empty = _engine(given.model, given.blocks), _engine(given.model, given.blocks)
    cached = fill(full, given.blocks)

    def step(engine: Engine, number: int) -> Cost:
        work = mixed(96, seed=1000 + number // 2)  # the same for both, and new to their caches
        trace = run_offline(engine, work, f"round-{number}")
        return Cost(statistics.median(trace.step_s) * 1e3, trace.cpu_s / len(trace.step_s) * 1e3)

    numbers = itertools.count()
    pairs = alternate(lambda: step(full, next(numbers)), lambda: step(empty, next(numbers)), given.rounds)
    print_result(CachedRun(cached, [[list(a), list(b)] for a, b in pairs]))


def _engine(model: Path, blocks: int) -> Engine:
    from headrace.engine.engine import Engine

    config = EngineConfig(max_num_seqs=64, num_kv_blocks=blocks + _LEFT)
    engine = Engine(Skipping(open_engine(model, config).runner), config)
    run_offline(engine, warm_up(), "warm-up")
    return engine


def fill(engine: Engine, blocks: int) -> int:
    """Have at least `blocks` blocks in the cache that nobody uses. Gives how many there are."""
    runner = engine.runner
    if not isinstance(runner, Skipping):
        raise TypeError("only an engine that can skip its model can be filled")
    runner.skips = True
    number = 0
    while engine.stats().cached_blocks < blocks:
        run_offline(engine, uniform(1, _PROMPT_BLOCKS * _BLOCK, 2, seed=10_000 + number), f"fill-{number}")
        number += 1
    runner.skips = False
    return engine.stats().cached_blocks


def section(settings: Settings, say: Say) -> Section:
    """Compare at several fillings."""
    runs: list[CachedRun] = []
    for count in QUICK_COUNTS if settings.quick else COUNTS:
        say(f"{count:,} blocks")
        rounds = 2 if settings.quick else settings.pairs
        model = settings.model("tiny2")
        arguments = ("--model", model, "--blocks", count, "--rounds", rounds)
        runs.append(fresh(CachedRun, "benchmarks.cached_blocks", *arguments))
    found = [(run, _compared(run)) for run in runs]
    rows = tuple((run.blocks, ratio.wall.text(), ratio.cpu.text(), ratio.unit) for run, ratio in found)
    line = Line("ratio", tuple(float(run.blocks) for run in runs), tuple(ratio.quoted.median for _, ratio in found))
    last, ratio = found[-1]
    what = f"a step with {last.blocks:,} cached blocks over one with few"
    columns = ("cached blocks", "seconds", "CPU seconds", "to be quoted")
    return Section(
        name="cached",
        title="A full prefix cache",
        how="tiny2: median step of 96 mixed requests on an engine whose cache is full, over that on one whose cache is "
        "empty. Every new block of the full one drops a cached one.",
        claims=(Claim(what, ratio.quoted.median, MOST_RATIO, f"× the {ratio.unit}"),),
        tables=(Table("A step over one with an empty cache", columns, rows),),
        plots=(Plot("cached_blocks", "A full prefix cache", "cached blocks", "step time, ratio", (line,), log_x=True),),
        raw={str(run.blocks): asdict(run) for run in runs},
    )


def _compared(run: CachedRun) -> Comparison:
    return compare([(Cost(*full), Cost(*empty)) for full, empty in run.steps])


if __name__ == "__main__":
    main()
