"""Whether memory grows with time: 100,000 engine steps with random arrivals, cancels and shared prefixes.

    python -m benchmarks.leak --model DIR --steps 100000

Resident memory is read 200 times. What is touched for the first time (KV blocks, the allocator's arenas, the prefix
cache filling up) is so in the first fifth, which is warm-up. After it, memory is flat if the medians of the first and
last tenth of the readings differ by less than 32 bytes for each step between them: the smallest object that Python can
keep (an integer of its own, 28 bytes, is rounded up to 32), so one object kept for each step, or some tens of them for
each request, would show.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.types import EngineConfig, Request, SamplingOptions

from .offline import open_engine
from .processes import fresh, print_result, resident_bytes
from .sections import Claim, Line, Plot, Section, Table
from .settings import Say, Settings

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

STEPS = 100_000
READINGS = 200
WARM_UP = 0.2  # share of the steps
MOST_BYTES_PER_STEP = 32.0
_MAX_NUM_SEQS = 16
_NUM_BLOCKS = 64  # few: blocks run out, sequences give way, cached prefixes are dropped
_VOCAB = 512


@dataclass(frozen=True, slots=True)
class LeakRun:
    """One run."""

    steps: int
    requests: int
    aborted: int
    preemptions: int
    prefix_hits: int  # prompt tokens that the cache served
    resident_mib: list[float]  # after each share of the steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Step and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leak")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args(arguments)
    config = EngineConfig(
        max_num_seqs=_MAX_NUM_SEQS, max_num_batched_tokens=256, max_model_len=512, num_kv_blocks=_NUM_BLOCKS
    )
    print_result(Churn(open_engine(given.model, config)).run(given.steps))


class Churn:
    """Random requests that come, share, sample, end and are cancelled."""

    def __init__(self, engine: Engine, seed: int = 7) -> None:
        self._engine = engine
        self._rnd = random.Random(seed)
        self._heads = [self._ids(64) for _ in range(12)]
        self._added = 0
        self._aborted = 0

    def run(self, steps: int) -> LeakRun:
        """Make so many steps that compute something."""
        readings: list[float] = []
        every = max(1, steps // READINGS)
        done = 0
        while done < steps:
            while self._engine.requests < _MAX_NUM_SEQS * 2 and self._rnd.random() < 0.6:
                self._engine.add(self._request())
            done += bool(self._engine.step().scheduled)
            if self._rnd.random() < 0.1 and self._added:
                before = self._engine.requests
                self._engine.abort(f"leak-{self._rnd.randrange(max(0, self._added - 24), self._added)}")
                self._aborted += before - self._engine.requests
            if done >= every * (len(readings) + 1):
                readings.append(resident_bytes() / 2**20)
        stats = self._engine.stats()
        return LeakRun(done, self._added, self._aborted, stats.preemptions, stats.prefix_hits, readings)

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rnd.randrange(3, _VOCAB) for _ in range(count))

    def _request(self) -> Request:
        rnd = self._rnd
        prompt = (*(rnd.choice(self._heads) if rnd.random() < 0.6 else ()), *self._ids(rnd.randint(1, 40)))
        sampled = rnd.random() < 0.5
        options = SamplingOptions(
            max_tokens=rnd.randint(1, 60),
            temperature=0.8 if sampled else 0.0,
            top_p=rnd.choice((1.0, 0.9)),
            top_k=rnd.choice((0, 20)),
            repetition_penalty=rnd.choice((1.0, 1.1)),
            frequency_penalty=rnd.choice((0.0, 0.2)),
            seed=rnd.getrandbits(63),
            ignore_eos=rnd.random() < 0.5,
            n=2 if rnd.random() < 0.1 else 1,
            logprobs=2 if rnd.random() < 0.1 else None,
        )
        self._added += 1
        return Request(f"leak-{self._added - 1}", prompt, options, cache_salt=rnd.choice(("", "", "a")))


def growth_bytes_per_step(run: LeakRun) -> float:
    """How much memory grew for each step after the warm-up. Raises StatisticsError for too few readings."""
    after = run.resident_mib[int(len(run.resident_mib) * WARM_UP) :]
    tenth = max(1, len(after) // 10)
    grown = statistics.median(after[-tenth:]) - statistics.median(after[:tenth])
    between = (len(after) - tenth) * run.steps / len(run.resident_mib)
    return grown * 2**20 / between


def section(settings: Settings, say: Say) -> Section:
    """Run once: many steps are what this is about."""
    steps = 3_000 if settings.quick else STEPS
    say(f"{steps:,} steps")
    run = fresh(LeakRun, "benchmarks.leak", "--model", settings.model("micro"), "--steps", steps)
    growth = growth_bytes_per_step(run)
    every = run.steps / len(run.resident_mib)
    line = Line("resident", tuple(every * (n + 1) for n in range(len(run.resident_mib))), tuple(run.resident_mib))
    rows = ((run.steps, run.requests, run.aborted, run.preemptions, run.prefix_hits, growth),)
    columns = ("steps", "requests", "cancelled", "preemptions", "tokens from the cache", "bytes a step")
    return Section(
        name="leak",
        title="Memory over many steps",
        how="A model of one small layer; requests come at random, share prefixes, sample, are cancelled and preempted. "
        "Growth is that of resident memory after the first fifth of the steps; less than the smallest object of "
        "Python's for each step is flat.",
        claims=(Claim("growth of resident memory", growth, MOST_BYTES_PER_STEP, "bytes a step"),),
        tables=(Table("What ran", columns, rows),),
        plots=(Plot("leak", "Resident memory", "steps", "MiB", (line,)),),
        raw=asdict(run),
    )


if __name__ == "__main__":
    main()
