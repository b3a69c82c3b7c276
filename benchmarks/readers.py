"""Ten thousand readers on one server, each with a connection of its own and a stream of its own.

    python -m benchmarks.readers --model DIR --readers 10000

All wait for their streams before the first job is there, as browsers behind a gateway would; a worker then serves as
many requests as there are readers. With `--readers 0` nobody reads: the same work for comparison.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.clients.keys import Keys

from .crowd import SPARE_FILES, Crowd, allow_files
from .pairs import alternate, ratios, spread
from .processes import Stopwatch, cpu_seconds, fresh, print_result
from .rig import connect, enqueue, server, worker
from .sections import Section, Table
from .settings import Say, Settings
from .workloads import uniform

READERS = 10_000
MAX_NUM_SEQS, NUM_IN, NUM_OUT = 256, 16, 16


@dataclass(frozen=True, slots=True)
class ReadersRun:
    """One run."""

    readers: int
    requests: int
    wall_s: float  # from the first job to the last terminal entry
    tokens_per_s: float  # delivered, or computed if nobody reads
    server_cpu_s: float
    worker_cpu_s: float
    reader_cpu_s: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run once and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readers")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--readers", type=int, default=READERS)
    parser.add_argument("--requests", type=int, default=READERS)
    given = parser.parse_args(arguments)
    if given.readers not in (0, given.requests):
        parser.error("there is one reader a request, or none")
    allow_files(files := given.requests + SPARE_FILES)
    flags = {"--max-num-seqs": MAX_NUM_SEQS, "--num-kv-blocks": 4 * MAX_NUM_SEQS}
    ids = [f"reader-{number}" for number in range(given.requests)]
    with (
        server("--maxclients", str(files)) as valkey,
        worker(valkey.url, given.model, flags) as running,
        Crowd(valkey.port, running.keys, ids[: given.readers]) as crowd,
    ):
        jobs = list(zip(ids, uniform(given.requests, NUM_IN, NUM_OUT), strict=True))
        before = cpu_seconds(running.pid), cpu_seconds(valkey.pid)
        watch = Stopwatch()
        enqueue(valkey.url, running.keys, jobs)
        while crowd.open:
            crowd.take()
        if not given.readers:
            _wait_until_served(valkey.url, running.keys)
        elapsed = watch.read()
        after = cpu_seconds(running.pid), cpu_seconds(valkey.pid)
        crowd.check([NUM_OUT] * given.readers)
    result = ReadersRun(
        readers=given.readers,
        requests=given.requests,
        wall_s=elapsed.wall_s,
        tokens_per_s=given.requests * NUM_OUT / elapsed.wall_s,
        server_cpu_s=after[1] - before[1],
        worker_cpu_s=after[0] - before[0],
        reader_cpu_s=elapsed.cpu_s,
    )
    print_result(result)


def _wait_until_served(url: str, keys: Keys) -> None:
    """A job's entry is deleted when its answer is complete."""
    with connect(url) as client:
        while client.xlen(keys.jobs()):
            time.sleep(0.05)


def section(settings: Settings, say: Say) -> Section:
    """Alternate the work with and without its readers."""
    count = 1_000 if settings.quick else READERS

    def run(readers: int) -> ReadersRun:
        say(f"{readers:,} readers")
        return fresh(
            ReadersRun, "benchmarks.readers", "--model", settings.model("tiny2"), "--readers", readers, "--requests",
            count
        )  # fmt: skip

    pairs = alternate(lambda: run(count), lambda: run(0), settings.pairs)
    served = ratios([(a.server_cpu_s, b.server_cpu_s) for a, b in pairs])
    rows = tuple(
        (
            f"{group[0].readers:,}",
            spread([each.tokens_per_s for each in group]).text(0),
            spread([each.server_cpu_s for each in group]).text(2),
            spread([each.worker_cpu_s for each in group]).text(2),
            spread([each.reader_cpu_s for each in group]).text(2),
        )
        for group in ([a for a, _ in pairs], [b for _, b in pairs])
    )
    columns = ("readers", "tokens a second", "server, CPU s", "worker, CPU s", "readers, CPU s")
    return Section(
        name="readers",
        title=f"{count:,} readers on one server",
        how=f"tiny2, {count:,} requests of {NUM_OUT} tokens; each is followed on a connection of its own, all "
        "waiting before the first job comes. Without readers the same work is timed to the end of its last job.",
        tables=(Table("With and without readers", columns, rows),),
        notes=(f"The server's CPU time with readers is {served.text(2)} × that without.",),
        raw={"pairs": [[asdict(a), asdict(b)] for a, b in pairs]},
    )


if __name__ == "__main__":
    main()
