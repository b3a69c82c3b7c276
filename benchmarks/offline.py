"""The bare engine: requests put in with `Engine.add`, stepped to their end, and what each step took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.threads import configure_threads
from headrace.engine.types import EngineConfig, Request, SamplingOptions

from .processes import Stopwatch
from .workloads import Work

if TYPE_CHECKING:
    from headrace.engine.engine import Engine


@dataclass(slots=True)
class Trace:
    """One run of some work."""

    wall_s: float = 0.0
    cpu_s: float = 0.0  # of the whole process
    tokens_in: int = 0
    tokens_out: int = 0
    step_s: list[float] = field(default_factory=list[float])
    rows: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # of each step: computed, sampled


def open_engine(model_dir: Path, config: EngineConfig) -> Engine:
    """Load a checkpoint as `headrace worker` does, with a thread per core."""
    configure_threads()  # before anything else imports torch
    from headrace.engine.load import load_engine

    engine, _, _ = load_engine(model_dir, config)
    return engine


def request(request_id: str, work: Work) -> Request:
    """Greedy, past EOS, to exactly `num_out` tokens."""
    options = SamplingOptions(temperature=0.0, max_tokens=work.num_out, ignore_eos=True)
    return Request(request_id, tuple(work.prompt), options)


def run_offline(engine: Engine, work: Sequence[Work], name: str) -> Trace:
    """Add everything, step until nothing is left. Raises RuntimeError if a request ends but by its length."""
    trace = Trace(tokens_in=sum(len(each.prompt) for each in work))
    watch = Stopwatch()
    for number, each in enumerate(work):
        engine.add(request(f"{name}-{number}", each))
    while engine.has_work:
        begun_s = time.perf_counter()
        output = engine.step()
        trace.step_s.append(time.perf_counter() - begun_s)
        sampled = 0
        for each in output.outputs:
            sampled += len(each.token_ids)
            if each.finish is not None and each.finish.reason != "length":
                raise RuntimeError(f"{each.request_id} ended with {each.finish}")
        trace.tokens_out += sampled
        trace.rows.append((sum(count for _, _, count in output.scheduled), sampled))
    elapsed = watch.read()
    trace.wall_s, trace.cpu_s = elapsed.wall_s, elapsed.cpu_s
    wanted = sum(each.num_out for each in work)
    if trace.tokens_out != wanted:
        raise RuntimeError(f"{trace.tokens_out} tokens came out, not {wanted}")
    return trace
