"""Whether a million waiting jobs slow the worker: its steps with a short queue and with a very long one, on one server.

Both queues are filled by bare jobs before anything is measured. The worker is a new one for each run; it hands back
what it has when enough steps were counted, so the long queue stays long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from headrace.clients.keys import Keys

from .pairs import Cost, alternate, compare, ratios, spread
from .processes import cpu_seconds, fresh
from .rig import PREFIX, connect, enqueue, server
from .sections import Claim, Section, Table
from .settings import Say, Settings
from .worker_probe import ProbeRun
from .workloads import Work, uniform

MILLION = 1_000_000
MOST_RATIO = 1.05
BATCH, NUM_IN, NUM_OUT = 64, 16, 200


@dataclass(frozen=True, slots=True)
class BacklogRun:
    """One run of a worker on one of the queues."""

    waiting: int  # jobs in the queue when it began
    probe: ProbeRun
    server_cpu_us_per_token: float  # starting and ending of the worker included


def section(settings: Settings, say: Say) -> Section:
    """Fill both queues, then alternate."""
    count, steps = (20_000, 60) if settings.quick else (MILLION, 150)
    with server() as valkey:
        say(f"filling a queue with {count:,} jobs")
        lengths = {"long": count, "short": 4 * BATCH * (settings.pairs + 1)}
        for queue, length in lengths.items():
            enqueue(valkey.url, Keys(PREFIX, queue), _jobs(queue, length))

        def run(queue: str) -> BacklogRun:
            say(f"the {queue} queue")
            return measure(settings, valkey.url, valkey.pid, queue, steps)

        pairs = alternate(lambda: run("long"), lambda: run("short"), settings.pairs)
    return _report(pairs, count)


def _jobs(queue: str, count: int) -> Iterator[tuple[str, Work]]:
    (work,) = uniform(1, NUM_IN, NUM_OUT)
    return ((f"{queue}-{number}", work) for number in range(count))


def measure(settings: Settings, url: str, server_pid: int, queue: str, steps: int) -> BacklogRun:
    """Run a worker on a queue for some steps at full batch."""
    model = settings.model("tiny2")
    with connect(url) as client:
        waiting = int(client.xlen(Keys(PREFIX, queue).jobs()))
    before_s = cpu_seconds(server_pid)
    probe = fresh(
        ProbeRun, "benchmarks.worker_probe", "--url", url, "--queue", queue, "--batch", BATCH, "--model", model,
        "--tokenizer", model, "--steps", steps,
    )  # fmt: skip
    server_s = cpu_seconds(server_pid) - before_s
    return BacklogRun(waiting, probe, server_s / (BATCH * steps) * 1e6)


def _report(pairs: list[tuple[BacklogRun, BacklogRun]], count: int) -> Section:
    step = compare([(_step(a), _step(b)) for a, b in pairs])
    host = ratios([(a.probe.host_cpu_us_per_token, b.probe.host_cpu_us_per_token) for a, b in pairs])
    served = ratios([(a.server_cpu_us_per_token, b.server_cpu_us_per_token) for a, b in pairs])
    rows = (
        ("ms a step, median", *_both([(a.probe.step_ms, b.probe.step_ms) for a, b in pairs]), step.wall.text()),
        (
            "CPU ms a step",
            *_both([(a.probe.step_cpu_ms, b.probe.step_cpu_ms) for a, b in pairs]),
            step.cpu.text(),
        ),
        (
            "worker, CPU µs a token outside the model",
            *_both([(a.probe.host_cpu_us_per_token, b.probe.host_cpu_us_per_token) for a, b in pairs]),
            host.text(),
        ),
        (
            "server, CPU µs a token",
            *_both([(a.server_cpu_us_per_token, b.server_cpu_us_per_token) for a, b in pairs]),
            served.text(),
        ),
    )
    return Section(
        name="backlog",
        title="A long queue",
        how=f"tiny2, {BATCH} sequences at once, the real step loop, on a queue of {count:,} waiting jobs and on one of "
        f"{pairs[0][1].waiting:,}, on the same server.",
        claims=(
            Claim(
                f"a step with {count:,} jobs waiting over one with few",
                step.quoted.median,
                MOST_RATIO,
                f"× the {step.unit}",
            ),
        ),
        tables=(Table("With a long and a short queue", ("", "long", "short", "ratio"), rows),),
        raw={"pairs": [[asdict(a), asdict(b)] for a, b in pairs]},
    )


def _step(run: BacklogRun) -> Cost:
    return Cost(run.probe.step_ms, run.probe.step_cpu_ms)


def _both(pairs: list[tuple[float, float]]) -> tuple[str, str]:
    return spread([a for a, _ in pairs]).text(2), spread([b for _, b in pairs]).text(2)
