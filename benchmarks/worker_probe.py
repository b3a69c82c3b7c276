"""The real step loop in this process, on an engine whose steps are noted: what a token costs outside the model.

    python -m benchmarks.worker_probe --url URL --queue NAME --batch N [--model DIR] [--tokenizer DIR] [--steps N]

Without `--model`, the model is one that computes nothing. It serves until so many steps with exactly N decoding
sequences were counted, or until the queue is empty; what still runs is handed back.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from headrace.engine.engine import Engine
from headrace.engine.types import EngineConfig, ModelInfo, Runner
from headrace.worker.control import Control
from headrace.worker.options import WorkerSettings
from headrace.worker.service import run

from .offline import open_engine
from .processes import RunError, print_result
from .recorder import Mark, NullRunner, Recorder
from .rig import PREFIX

_NULL_MODEL = ModelInfo("null", "0" * 64)
_SETTLED = 8  # steps at full batch that are left out at the beginning


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """Means, or medians, over the steps in which exactly `batch` sequences decoded."""

    batch: int
    steps: int
    host_cpu_us_per_token: float  # of the whole process, all threads, outside the model
    host_wall_us_per_token: float  # waiting for the server included
    step_ms: float  # median, from one entry into the model to the next
    model_ms: float  # median, inside the model
    step_cpu_ms: float  # CPU of the whole process, all threads, inside the model and outside


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve, and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker_probe")
    parser.add_argument("--url", required=True)
    parser.add_argument("--queue", required=True)
    parser.add_argument("--batch", type=int, required=True, help="sequences at once")
    parser.add_argument("--model", type=Path, default=None, help="folder of a checkpoint; without it, a null model")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--steps", type=int, default=200, help="steps at full batch to count")
    given = parser.parse_args(arguments)
    from headrace.engine.tokenizer import load_tokenizer

    config = EngineConfig(max_num_seqs=given.batch, num_kv_blocks=8192)
    tokenizer = load_tokenizer(given.tokenizer)
    inner: Runner = open_engine(given.model, config).runner if given.model else NullRunner(tokenizer.vocab_size)
    control = Control()
    full = 0

    def on_step(_count: int) -> None:
        nonlocal full
        full += _is_full(recorder.marks[-1], given.batch)
        if full == given.steps + _SETTLED:
            control.request_stop()
            control.request_stop()  # twice: hand back at once

    recorder = Recorder(inner, on_step)
    settings = WorkerSettings(url=given.url, prefix=PREFIX, queue=given.queue, burst=True)
    run(Engine(recorder, config), tokenizer, _NULL_MODEL, settings, control=control)
    print_result(summary(recorder.marks, given.batch))


def _is_full(mark: Mark, batch: int) -> bool:
    return mark.tokens == mark.sampled == batch


def summary(marks: Sequence[Mark], batch: int) -> ProbeRun:
    """Take the mean over pairs of full steps that follow each other. Raises RunError if there are too few."""
    full = [(a, b) for a, b in pairwise(marks) if _is_full(a, batch) and _is_full(b, batch)][_SETTLED:]
    if len(full) < 2:
        raise RunError(f"only {len(full)} steps had {batch} sequences that decode")
    tokens = batch * len(full)
    return ProbeRun(
        batch=batch,
        steps=len(full),
        host_cpu_us_per_token=sum(b.entered_cpu_s - a.left_cpu_s for a, b in full) / tokens * 1e6,
        host_wall_us_per_token=sum(b.entered_s - a.left_s for a, b in full) / tokens * 1e6,
        step_ms=statistics.median(b.entered_s - a.entered_s for a, b in full) * 1e3,
        step_cpu_ms=sum(b.entered_cpu_s - a.entered_cpu_s for a, b in full) / len(full) * 1e3,
        model_ms=statistics.median(a.left_s - a.entered_s for a, _ in full) * 1e3,
    )


if __name__ == "__main__":
    main()
