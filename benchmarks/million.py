"""A million jobs in the queue, for real: what they take, how long they take to get there, and whom they slow down.

    python -m benchmarks.million --url redis://… --count 100000     # submit so many through the client

Filled twice: by bare jobs in pipelines, and by the client library one after the other. Then `headrace status`,
`headrace doctor`, and the script by which a worker takes, are run with all of them waiting, and beside a short queue.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.clients import Client
from headrace.clients.keys import GROUP, Keys
from headrace.worker.lua import TAKE

from .memory import used_bytes
from .processes import Stopwatch, cpu_seconds, environment, fresh, print_result, run_program
from .rig import PREFIX, connect, enqueue, server
from .sections import Cell, Claim, Section, Table
from .servers import binaries, name_of
from .settings import Say, Settings
from .workloads import Work, uniform

MILLION, FEW = 1_000_000, 4_000
MOST_RATIO = 1.5
TAKES, ROOM = 200, 16
NUM_IN, NUM_OUT = 32, 100
PROMPT = "Tell me a story about a fox that crosses a river, and say what it finds on the other side."
_PER_PROCESS = 100_000  # jobs


@dataclass(frozen=True, slots=True)
class Filled:
    """How a queue was filled."""

    wall_s: float
    cpu_s: float  # of the process that fills
    server_cpu_s: float


@dataclass(frozen=True, slots=True)
class Looked:
    """A command beside a queue. What the server did is the longest single command of it."""

    wall_s: float
    longest_us: float  # server's time for the slowest of the commands, on average


@dataclass(frozen=True, slots=True)
class QueueRun:
    """One queue on one server."""

    server: str
    way: str  # raw, client
    jobs: int
    used_bytes: int  # more than the empty server
    rss_bytes: int
    filled: Filled
    status: Looked
    doctor: Looked
    take_us: float  # server's time for one take of 16 jobs


def main(arguments: Sequence[str] | None = None) -> None:
    """Submit through the client and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.million")
    parser.add_argument("--url", required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=MILLION)
    given = parser.parse_args(arguments)
    with Client(given.url) as client:
        watch = Stopwatch()
        for number in range(given.first, given.first + given.count):
            client.submit(PROMPT, id=f"client-{number}", max_tokens=NUM_OUT)
        elapsed = watch.read()
    print_result(Filled(elapsed.wall_s, elapsed.cpu_s, 0.0))


def section(settings: Settings, say: Say) -> Section:
    """Long and short queues on every server; through the client, which takes minutes, on the first."""
    count = 5_000 if settings.quick else MILLION
    runs: list[QueueRun] = []
    for number, binary in enumerate(binaries()[: 1 if settings.quick else None]):
        for way in ("raw",) if number else ("raw", "client"):
            for jobs in (FEW, count):
                with server(binary=binary) as running:
                    say(f"{binary.name}: {jobs:,} jobs, {way}")
                    runs.append(measure(running.url, running.pid, way, jobs))
    return _report(runs, count)


def measure(url: str, pid: int, way: str, jobs: int) -> QueueRun:
    """Fill a queue on an empty server, and look at it."""
    with connect(url) as client:
        before = used_bytes(client)
        server_s = cpu_seconds(pid)
        filled = _fill_raw(url, jobs) if way == "raw" else _fill_by_client(url, jobs)
        server_s = cpu_seconds(pid) - server_s
        memory: dict[str, Any] = client.info("memory")
        return QueueRun(
            server=name_of(client.info("server")),
            way=way,
            jobs=jobs,
            used_bytes=int(memory["used_memory"]) - before,
            rss_bytes=int(memory["used_memory_rss"]),
            filled=Filled(filled.wall_s, filled.cpu_s, server_s),
            status=look(client, url, "status"),
            doctor=look(client, url, "doctor"),
            take_us=take_us(client),
        )


def _fill_raw(url: str, jobs: int) -> Filled:
    (work,) = uniform(1, NUM_IN, NUM_OUT)
    watch = Stopwatch()
    enqueue(url, Keys(PREFIX), _jobs(work, jobs))
    elapsed = watch.read()
    return Filled(elapsed.wall_s, elapsed.cpu_s, 0.0)


def _fill_by_client(url: str, jobs: int) -> Filled:
    """In processes of their own, one after the other: none of them takes too long."""
    parts = [
        fresh(Filled, __name__, "--url", url, "--first", first, "--count", min(_PER_PROCESS, jobs - first))
        for first in range(0, jobs, _PER_PROCESS)
    ]
    return Filled(sum(part.wall_s for part in parts), sum(part.cpu_s for part in parts), 0.0)


def _jobs(work: Work, jobs: int) -> Any:
    return ((f"raw-{number}", work) for number in range(jobs))


def look(client: Any, url: str, command: str) -> Looked:
    """Run a command of ours beside the queue."""
    client.config_resetstat()
    begun_s = time.perf_counter()
    # The doctor ends with the code of what it finds: a queue without a worker.
    code = "import sys; from headrace.worker.cli import run; sys.exit(run(sys.argv[1:]) not in (0, 16, 17))"
    said = run_program([sys.executable, "-c", code, command, "--json", "--redis-url", url], environment())
    wall_s = time.perf_counter() - begun_s
    json.loads(said)
    return Looked(wall_s, max(float(each["usec_per_call"]) for each in client.info("commandstats").values()))


def take_us(client: Any) -> float:
    """What the server needs for one take of a worker, on average over some."""
    keys = Keys(PREFIX)
    for stream in keys.all_jobs:
        client.xgroup_create(stream, GROUP, "0", mkstream=True)
    sha = client.script_load(TAKE.source)
    client.config_resetstat()
    for _ in range(TAKES):
        client.evalsha(sha, 3, *keys.all_jobs, "bench", ROOM)
    return float(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])


def _row(run: QueueRun) -> tuple[Cell, ...]:
    return (
        *(run.server, run.way, f"{run.jobs:,}", round(run.used_bytes / run.jobs), f"{run.rss_bytes / 2**20:,.0f} MiB"),
        *(round(run.filled.wall_s, 1), round(run.filled.cpu_s / run.jobs * 1e6)),
        round(run.filled.server_cpu_s / run.jobs * 1e6, 1),
        f"{run.status.wall_s:.2f} ({run.status.longest_us:,.0f} µs)",
        f"{run.doctor.wall_s:.2f} ({run.doctor.longest_us:,.0f} µs)",
        round(run.take_us),
    )


def _report(runs: list[QueueRun], count: int) -> Section:
    columns = (
        *("server", "filled by", "jobs", "bytes a job", "resident", "filled in s", "client, CPU µs a job"),
        *("server, CPU µs a job", "status, s (longest command)", "doctor, s (longest command)", "take of 16, µs"),
    )
    by_place = {(run.server, run.way, run.jobs): run.take_us for run in runs}
    names = dict.fromkeys(run.server for run in runs)
    return Section(
        name="million",
        title=f"{count:,} jobs in the queue",
        how=f"Bare jobs of {NUM_IN} token ids in pipelines of 1,000, and jobs with a short prompt through the client, "
        "one after the other; each on a server of its own without a file. A take is a worker's script, timed by the "
        "server, as is the longest command of `status` and `doctor`.",
        claims=tuple(
            Claim(
                f"{name}: a take with {count:,} jobs waiting over one with few",
                by_place[name, "raw", count] / by_place[name, "raw", FEW],
                MOST_RATIO,
                "× the server's time",
            )
            for name in names
        ),
        tables=(Table("Filled, looked at, taken from", columns, tuple(_row(run) for run in runs)),),
        notes=(
            "Where the machine does other work meanwhile (its load stands above), seconds are too long; bytes and the "
            "server's own times hardly are",
        ),
        raw={"runs": [asdict(run) for run in runs]},
    )


if __name__ == "__main__":
    main()
