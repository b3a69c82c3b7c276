"""How a decode step's time grows with the batch and with the context: linearly, or worse.

    python -m benchmarks.scaling --model DIR --batches 1 8 64 --contexts 64 --steps 12 [--rounds 3]

Each point runs so many sequences of so many tokens, alone in the engine, and takes the median of its decode steps.
Points are taken in rounds, up and down, so that a drift of the machine does not look like growth; prompts are computed
in the first round and found in the prefix cache afterwards.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.types import EngineConfig

from .offline import open_engine, request, run_offline
from .processes import fresh, print_result
from .sections import Claim, Line, Plot, Section, Table
from .settings import Say, Settings, dtype_of
from .workloads import Work, uniform, warm_up

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 256, 1024, 2048, 4096)
_BLOCK = 16
# A step costs a + b·n; doubling n then at most doubles it, an exponent of at most 1. Two medians of a step time that
# drifts by 7 % between them can be 14 % apart, which over one doubling is log2(1.14) = 0.19.
MOST_EXPONENT = 1.0 + math.log2(1.14)


@dataclass(frozen=True, slots=True)
class Point:
    """One point."""

    batch: int
    context: int  # tokens of each sequence when its steps are measured
    step_ms: float


@dataclass(frozen=True, slots=True)
class ScalingRun:
    """All points of one process; each is [batch, context, median ms of a step]."""

    model: str
    points: list[list[float]]

    def typed(self) -> list[Point]:
        """The points by name."""
        return [Point(int(batch), int(context), step_ms) for batch, context, step_ms in self.points]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every batch with every context and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--contexts", type=int, nargs="+", default=[64])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args(arguments)
    wanted = list(itertools.product(given.batches, given.contexts))
    blocks = max(given.batches) * (sum(given.contexts) // _BLOCK + 4 * len(given.contexts)) + 256
    config = EngineConfig(max_num_seqs=max(given.batches), num_kv_blocks=blocks, dtype=given.dtype)
    engine = open_engine(given.model, config)
    run_offline(engine, warm_up(), "warm-up")
    found: dict[tuple[int, int], list[float]] = {point: [] for point in wanted}
    for number in range(given.rounds):
        for batch, context in wanted if number % 2 == 0 else reversed(wanted):
            found[batch, context] += decode_steps_s(engine, batch, context, given.steps)
    points = [[batch, context, statistics.median(steps_s) * 1e3] for (batch, context), steps_s in found.items()]
    print_result(ScalingRun(given.model.name, points))


def decode_steps_s(engine: Engine, batch: int, context: int, steps: int) -> list[float]:
    """Seconds of `steps` steps in which `batch` sequences of `context` tokens decode; nothing is left of them after."""
    prompts = uniform(batch, context, 1, seed=context)
    run_offline(engine, prompts, "prompts")  # the cache has them now, all but their last tokens
    spare = batch * 2 * _BLOCK // engine.config.max_num_batched_tokens + 8  # steps until all of them decode
    ids = [f"scaling-{number}" for number in range(batch)]
    for request_id, each in zip(ids, prompts, strict=True):
        engine.add(request(request_id, Work(each.prompt, steps + spare)))
    taken: list[float] = []
    while len(taken) <= steps:
        begun_s = time.perf_counter()
        output = engine.step()
        took_s = time.perf_counter() - begun_s
        if len(output.scheduled) == batch == len(output.outputs) == sum(count for _, _, count in output.scheduled):
            taken.append(took_s)
        elif taken:
            raise RuntimeError(f"a step ran {output.scheduled} after all {batch} sequences had begun to decode")
    for request_id in ids:
        engine.abort(request_id)
    return taken[1:]  # the first has the buffers of the step before it


def exponents(sizes: Sequence[float], times: Sequence[float]) -> list[float]:
    """For each two neighbours, the power of the size with which the time grows: 1 is linear, 0 is not at all."""
    pairs = itertools.pairwise(zip(sizes, times, strict=True))
    return [math.log(t2 / t1) / math.log(n2 / n1) for (n1, t1), (n2, t2) in pairs]


def section(settings: Settings, say: Say) -> Section:
    """Batch and context, on both models."""
    parts = [_part(settings, say, "tiny2", "batch"), _part(settings, say, "tiny2", "context")]
    if not settings.quick:
        parts += [_part(settings, say, "smol135", "batch"), _part(settings, say, "smol135", "context")]
    return Section(
        name="scaling",
        title="Step time by batch and by context",
        how="Median time of a step in which all sequences decode. An exponent of 1 between neighbouring sizes is "
        f"linear growth; the limit allows for 7 % of drift on either side: {MOST_EXPONENT:.2f}.",
        claims=tuple(each[0] for each in parts),
        tables=tuple(each[1] for each in parts),
        plots=tuple(each[2] for each in parts),
        raw={f"{each[3].model}-{number}": asdict(each[3]) for number, each in enumerate(parts)},
    )


def _part(settings: Settings, say: Say, model: str, by: str) -> tuple[Claim, Table, Plot, ScalingRun]:
    say(f"{model}, {by}")
    fixed = 4 if model == "smol135" else 8  # the batch at which contexts are compared
    batches = (BATCHES[::4] if settings.quick else BATCHES) if by == "batch" else (fixed,)
    contexts = (CONTEXTS[:3] if settings.quick else CONTEXTS) if by == "context" else (64,)
    steps, rounds = (8, 2) if settings.quick else (24, 4)
    run = fresh(
        ScalingRun, "benchmarks.scaling", "--model", settings.model(model), "--dtype", dtype_of(model), "--batches",
        *batches, "--contexts", *contexts, "--steps", steps, "--rounds", rounds,
    )  # fmt: skip
    points = run.typed()
    sizes = tuple(float(each.batch if by == "batch" else each.context) for each in points)
    times = tuple(each.step_ms for each in points)
    growth = exponents(sizes, times)
    rows = tuple((int(n), t, e) for n, t, e in zip(sizes, times, (None, *growth), strict=True))
    claim = Claim(f"{model}: greatest exponent of a step's time by {by}", max(growth), MOST_EXPONENT)
    rest = f"context {contexts[0]}" if by == "batch" else f"batch {fixed}"
    table = Table(f"{model}, {rest}", (by, "ms a step", "exponent"), rows)
    plot = Plot(
        f"scaling_{model}_{by}", f"{model}, {rest}", by, "ms per step", (Line(model, sizes, times),), True, True
    )
    return claim, table, plot, run


if __name__ == "__main__":
    main()
