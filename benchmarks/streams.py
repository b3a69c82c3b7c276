"""How many tokens a second come out of some streams that decode side by side, beside llama.cpp doing the same.

    python -m benchmarks.streams --model DIR --streams 8

Each stream has a prompt of 144 tokens and gives 72. Only steps count in which every stream decodes one token and no
prompt is computed: that is what llama.cpp's batched bench reports as its text generation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.engine.types import EngineConfig

from . import peers
from .offline import open_engine, run_offline
from .pairs import alternate, ratios, spread
from .processes import fresh, print_result
from .sections import Claim, Line, Plot, Section, Table
from .settings import Say, Settings
from .workloads import uniform, warm_up

NUM_IN, NUM_OUT = 144, 72
COUNTS = (1, 8, 32, 64)
# The least ratio to llama.cpp that we are content with.
WANTED = {1: 0.95, 8: 1.25, 32: 1.25}


@dataclass(frozen=True, slots=True)
class StreamsRun:
    """One run."""

    streams: int
    tokens_per_s: float  # of all streams together
    steps: int  # that counted
    wall_s: float  # of the whole run, prompts included
    cpu_s: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one number of streams and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args(arguments)
    config = EngineConfig(max_num_seqs=given.streams, num_kv_blocks=14 * given.streams + 256, dtype=given.dtype)
    engine = open_engine(given.model, config)
    run_offline(engine, warm_up(), "warm-up")
    trace = run_offline(engine, uniform(given.streams, NUM_IN, NUM_OUT), "run")
    full = (given.streams, given.streams)
    steps_s = [step_s for step_s, rows in zip(trace.step_s, trace.rows, strict=True) if rows == full]
    if not steps_s:
        raise RuntimeError("there is no step in which all streams decode")
    rate = given.streams * len(steps_s) / sum(steps_s)
    print_result(StreamsRun(given.streams, rate, len(steps_s), trace.wall_s, trace.cpu_s))


def section(settings: Settings, say: Say) -> Section:
    """Run every number of streams, beside llama.cpp where it is there."""
    model, llama = settings.model("smol135"), peers.llama()
    runs: dict[int, list[tuple[StreamsRun, peers.LlamaRun | None]]] = {}
    for count in COUNTS[:2] if settings.quick else COUNTS:

        def ours(count: int = count) -> StreamsRun:
            say(f"{count} streams")
            return fresh(StreamsRun, "benchmarks.streams", "--model", model, "--streams", count)

        def theirs(count: int = count) -> peers.LlamaRun | None:
            if llama is None:
                return None
            say(f"{count} streams, llama.cpp")
            return llama.run(NUM_IN, NUM_OUT, count)

        runs[count] = alternate(ours, theirs, settings.pairs)
    return _report(runs)


def _report(runs: dict[int, list[tuple[StreamsRun, peers.LlamaRun | None]]]) -> Section:
    claims: list[Claim] = []
    rows: list[tuple[str | int | None, ...]] = []
    for count, pairs in runs.items():
        both = [(a.tokens_per_s, b.tokens_per_s) for a, b in pairs if b is not None]
        ratio = ratios(both) if both else None
        rate = spread([a.tokens_per_s for a, _ in pairs])
        peer = spread([b for _, b in both]).text(1) if both else "not run"
        rows.append((count, rate.text(1), peer, ratio.text() if ratio else None))
        if count in WANTED:
            value, note = (ratio.median, "") if ratio else (None, peers.LLAMA_MISSING)
            what = f"{count} stream{'s' * (count > 1)}: tokens a second over llama.cpp's"
            claims.append(Claim(what, value, WANTED[count], "×", at_most=False, note=note))
    return Section(
        name="streams",
        title="Streams side by side",
        how=f"smol135 in bfloat16, prompts of {NUM_IN} tokens, {NUM_OUT} out; steps in which all streams decode. "
        "llama.cpp by its batched bench; one stream by its llama-bench without a prompt, where it is faster.",
        claims=tuple(claims),
        tables=(Table("Tokens a second", ("streams", "headrace", "llama.cpp", "ratio"), tuple(rows)),),
        plots=(_plot(runs),),
        raw={str(count): [[asdict(a), asdict(b) if b else None] for a, b in pairs] for count, pairs in runs.items()},
    )


def _plot(runs: dict[int, list[tuple[StreamsRun, peers.LlamaRun | None]]]) -> Plot:
    counts = tuple(float(count) for count in runs)
    ours = tuple(spread([a.tokens_per_s for a, _ in pairs]).median for pairs in runs.values())
    lines = [Line("headrace", counts, ours)]
    theirs = [[b.tokens_per_s for _, b in pairs if b is not None] for pairs in runs.values()]
    if all(theirs):
        lines.append(Line("llama.cpp", counts, tuple(spread(each).median for each in theirs)))
    return Plot("streams", "Decoding side by side", "streams", "tokens per second", tuple(lines), log_x=True)


if __name__ == "__main__":
    main()
