"""How much later a first token comes through the queue than from an engine in the same process.

    python -m benchmarks.first_token bare|library|direct --model DIR [--rate 100] [--seconds 20]

Requests arrive at random, on average `rate` a second (Poisson), at the same instants in all ways. `bare` and `library`
put them into a queue with a real worker (`open_loop` says how); counted from the call. `direct` puts each into
`Engine.add` as soon as its instant has passed and the step under way is over; counted from its instant.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.engine.types import EngineConfig

from .crowd import SPARE_FILES, allow_files
from .offline import open_engine, request, run_offline
from .open_loop import Arrival, Times, bare_client, library_client, poisson
from .pairs import Spread, alternate, percentile, spread
from .processes import cpu_seconds, fresh, print_result
from .rig import server, worker
from .sections import Claim, Line, Plot, Section, Table
from .settings import Say, Settings, dtype_of
from .workloads import warm_up

MODEL = "tiny2"
MAX_NUM_SEQS = 64
NUM_IN, NUM_OUT = 64, 16
WARM_UP_S = 1.0  # of arrivals at the same rate, which are not counted
MOST_MS = 5.0  # above the direct way, at the 99th percentile


@dataclass(frozen=True, slots=True)
class FirstTokenRun:
    """One run."""

    way: str
    first_token_ms: list[float]  # of each request, in the order of arrival
    late_p99_ms: float  # how much later than its instant a request was put in; the client's own lateness
    worker_cpu_s: float  # 0 where there is no queue
    server_cpu_s: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the ways and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_token")
    parser.add_argument("way", choices=("bare", "library", "direct"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args(arguments)
    due = poisson(given.rate, WARM_UP_S + given.seconds, NUM_IN, NUM_OUT)
    direct_way = given.way == "direct"
    print_result(direct(given.model, due) if direct_way else through_queue(given.way, given.model, due))


def direct(model: Path, due: Sequence[Arrival]) -> FirstTokenRun:
    """One thread that adds what is due between steps."""
    engine = open_engine(model, EngineConfig(max_num_seqs=MAX_NUM_SEQS, num_kv_blocks=4096, dtype=dtype_of(MODEL)))
    run_offline(engine, warm_up(), "warm-up")
    first_ms, late_ms = [0.0] * len(due), [0.0] * len(due)
    begun_s, added = time.perf_counter(), 0
    while added < len(due) or engine.has_work:
        now_s = time.perf_counter() - begun_s
        while added < len(due) and due[added].at_s <= now_s:
            engine.add(request(str(added), due[added].work))
            late_ms[added] = (now_s - due[added].at_s) * 1e3
            added += 1
        if not engine.has_work:
            time.sleep(max(0.0, due[added].at_s - now_s))
            continue
        outputs = engine.step().outputs
        now_s = time.perf_counter() - begun_s
        for output in outputs:
            if output.index == 0:
                number = int(output.request_id)
                first_ms[number] = (now_s - due[number].at_s) * 1e3
    return _result("direct", due, (first_ms, late_ms))


def through_queue(way: str, model: Path, due: Sequence[Arrival]) -> FirstTokenRun:
    """A client beside a server and a worker."""
    allow_files(len(due) + SPARE_FILES)
    flags = {"--max-num-seqs": MAX_NUM_SEQS, "--num-kv-blocks": 4096, "--dtype": dtype_of(MODEL)}
    with server() as valkey, worker(valkey.url, model, flags) as running:
        before = cpu_seconds(running.pid), cpu_seconds(valkey.pid)
        if way == "bare":
            times = bare_client(valkey.port, running.keys, due)
        else:
            times = library_client(valkey.url, running.keys, due)
        after = cpu_seconds(running.pid), cpu_seconds(valkey.pid)
    return _result(way, due, times, after[0] - before[0], after[1] - before[1])


def _result(
    way: str, due: Sequence[Arrival], times: Times, worker_cpu_s: float = 0.0, server_cpu_s: float = 0.0
) -> FirstTokenRun:
    first_ms, late_ms = times
    counted = [number for number, each in enumerate(due) if each.at_s >= WARM_UP_S]
    return FirstTokenRun(
        way=way,
        first_token_ms=[round(first_ms[number], 3) for number in counted],
        late_p99_ms=percentile([late_ms[number] for number in counted], 0.99),
        worker_cpu_s=worker_cpu_s,
        server_cpu_s=server_cpu_s,
    )


def section(settings: Settings, say: Say) -> Section:
    """Alternate each client with the direct way; compare percentiles, and each request with itself."""
    seconds = 3.0 if settings.quick else 12.0

    def run(way: str) -> FirstTokenRun:
        say(way)
        model = settings.model(MODEL)
        return fresh(FirstTokenRun, "benchmarks.first_token", way, "--model", model, "--seconds", seconds)

    bare = alternate(lambda: run("bare"), lambda: run("direct"), settings.pairs)
    library = alternate(lambda: run("library"), lambda: run("direct"), settings.pairs)
    direct_ms = [b.first_token_ms for _, b in bare + library]
    above = {"bare": _above(bare), "library": _above(library)}
    rows = (
        ("Engine.add", *_both(direct_ms)),
        ("queue, bare client", *_both([a.first_token_ms for a, _ in bare])),
        ("queue, AsyncClient", *_both([a.first_token_ms for a, _ in library])),
        ("bare client above Engine.add, request by request", *_both(above["bare"])),
        ("AsyncClient above Engine.add, request by request", *_both(above["library"])),
        ("bare client's percentile above that of Engine.add", *_apart(bare)),
        ("AsyncClient's percentile above that of Engine.add", *_apart(library)),
    )
    p99 = spread([percentile(each, 0.99) for each in above["bare"]])
    late = spread([a.late_p99_ms for a, _ in bare + library])
    return Section(
        name="first_token",
        title="First token through the queue",
        how=f"{MODEL} in {dtype_of(MODEL)}, 100 requests a second (Poisson) for {seconds:g} s, {NUM_IN} tokens in and "
        f"{NUM_OUT} out, the same arrivals through the queue and put into `Engine.add`. The bare client adds jobs "
        "without waiting and holds a connection for each reader; AsyncClient is the library, all in one event loop.",
        claims=(Claim("first token above that of `Engine.add`, p99, bare client", p99.median, MOST_MS, "ms"),),
        tables=(Table("Milliseconds to the first token", ("", "p50", "p99"), rows),),
        plots=(_plot({"queue, bare": bare[0][0], "queue, AsyncClient": library[0][0], "Engine.add": bare[0][1]}),),
        notes=(f"The clients themselves put requests in late by {late.text(2)} ms (p99); that is not counted.",),
        raw={
            "bare": [[asdict(a), asdict(b)] for a, b in bare],
            "library": [[asdict(a), asdict(b)] for a, b in library],
        },
    )


def _above(pairs: Sequence[tuple[FirstTokenRun, FirstTokenRun]]) -> list[list[float]]:
    return [[a - b for a, b in zip(one.first_token_ms, other.first_token_ms, strict=True)] for one, other in pairs]


def _both(runs: Sequence[Sequence[float]]) -> tuple[str, str]:
    def of(share: float) -> Spread:
        return spread([percentile(each, share) for each in runs])

    return of(0.5).text(2), of(0.99).text(2)


def _apart(pairs: Sequence[tuple[FirstTokenRun, FirstTokenRun]]) -> tuple[str, str]:
    def of(share: float) -> Spread:
        return spread([percentile(a.first_token_ms, share) - percentile(b.first_token_ms, share) for a, b in pairs])

    return of(0.5).text(2), of(0.99).text(2)


def _plot(runs: Mapping[str, FirstTokenRun]) -> Plot:
    shares = tuple(number / 100 for number in range(1, 100))
    lines = tuple(
        Line(label, tuple(percentile(run.first_token_ms, share) for share in shares), shares)
        for label, run in runs.items()
    )
    return Plot("first_token", "First token", "milliseconds", "share of requests", lines)


if __name__ == "__main__":
    main()
