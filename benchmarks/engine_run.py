"""A workload on the bare engine, in a process of its own: how long it takes, and what each step ran.

    python -m benchmarks.engine_run W1 --model DIR [--limit N] [--budget N] [--max-num-seqs N] [--dtype TYPE]

For W3, four requests are run one after the other first: the first finds nothing in the cache, the others its head.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.types import EngineConfig

from .offline import open_engine, run_offline
from .processes import print_result
from .settings import Settings, fresh_workload
from .workloads import WORKLOADS, Work, warm_up

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

FIRST_ONES = 4  # requests of W3 whose first token is timed


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One run."""

    workload: str
    dtype: str
    wall_s: float
    cpu_s: float  # user and system of the whole process
    tokens_in: int
    tokens_out: int
    steps: int
    rows: list[list[int]]  # of each step: tokens computed, rows sampled
    step_ms: list[float]
    first_token_s: list[float]  # W3: the first is cold, the others warm


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one workload and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_run")
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--limit", type=int, default=None, help="only so many requests")
    parser.add_argument("--budget", type=int, default=512, help="most tokens in one step")
    parser.add_argument("--max-num-seqs", type=int, default=None, help="most requests at once")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args(arguments)
    workload = WORKLOADS[given.workload]
    config = EngineConfig(
        max_num_seqs=given.max_num_seqs or workload.max_num_seqs,
        max_num_batched_tokens=given.budget,
        num_kv_blocks=workload.num_kv_blocks,
        dtype=given.dtype,
    )
    print_result(run(open_engine(given.model, config), workload.name, workload.make()[: given.limit], given.dtype))


def run(engine: Engine, name: str, work: Sequence[Work], dtype: str) -> EngineRun:
    """Warm up, run, and say what it took."""
    run_offline(engine, warm_up(), "warm-up")
    first_token_s = _first_tokens(engine, work) if name == "W3" else []
    trace = run_offline(engine, work, "run")
    return EngineRun(
        workload=name,
        dtype=dtype,
        wall_s=trace.wall_s,
        cpu_s=trace.cpu_s,
        tokens_in=trace.tokens_in,
        tokens_out=trace.tokens_out,
        steps=len(trace.step_s),
        rows=[list(each) for each in trace.rows],
        step_ms=[round(seconds * 1e3, 3) for seconds in trace.step_s],
        first_token_s=first_token_s,
    )


def _first_tokens(engine: Engine, work: Sequence[Work]) -> list[float]:
    ones = [Work(each.prompt, 1) for each in work[:FIRST_ONES]]
    return [run_offline(engine, [one], f"first-{number}").wall_s for number, one in enumerate(ones)]


def fresh_run(settings: Settings, workload: str, quick_limit: int) -> EngineRun:
    """Run in a new process. `quick_limit` requests are left of the workload in a quick run."""
    return fresh_workload(EngineRun, "benchmarks.engine_run", settings, workload, quick_limit)


if __name__ == "__main__":
    main()
