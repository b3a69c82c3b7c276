"""What a token costs outside the model, by batch size: CPU time of the real worker, with a model that computes nothing.

Counted is all that the worker's process does between leaving the model and entering it again: planning, detokenising,
packing, publishing, taking replies, on all of its threads. Nobody reads, as readers are no part of the worker.
"""

from __future__ import annotations

from dataclasses import asdict

from headrace.clients.keys import Keys

from .pairs import spread
from .processes import fresh
from .rig import PREFIX, enqueue, server
from .sections import Claim, Line, Plot, Section, Table
from .settings import Say, Settings
from .worker_probe import ProbeRun
from .workloads import uniform

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_US, AIM_US = 16.0, 8.0  # CPU microseconds a token at a batch of 256
_NUM_IN = 16


def section(settings: Settings, say: Say) -> Section:
    """Measure every batch size."""
    runs: dict[int, list[ProbeRun]] = {}
    for batch in (1, 16, 256) if settings.quick else BATCHES:
        for _ in range(settings.pairs):
            say(f"batch {batch}")
            runs.setdefault(batch, []).append(measure(settings, batch, 60 if settings.quick else 200))
    return _report(runs)


def measure(settings: Settings, batch: int, steps: int) -> ProbeRun:
    """One batch size on a new server with a new worker."""
    folder = settings.model("tiny2")
    # A worker takes 16 jobs a turn, so the first of them decode for a while before the last has come.
    num_out = steps + batch // 4 + 64
    queue = f"host-{batch}"
    with server() as valkey:
        jobs = ((f"host-{number}", each) for number, each in enumerate(uniform(batch, _NUM_IN, num_out)))
        enqueue(valkey.url, Keys(PREFIX, queue), jobs)
        return fresh(
            ProbeRun, "benchmarks.worker_probe", "--url", valkey.url, "--queue", queue, "--batch", batch,
            "--tokenizer", folder, "--steps", steps,
        )  # fmt: skip


def _report(runs: dict[int, list[ProbeRun]]) -> Section:
    cpu = {batch: spread([each.host_cpu_us_per_token for each in found]) for batch, found in runs.items()}
    wall = {batch: spread([each.host_wall_us_per_token for each in found]) for batch, found in runs.items()}
    rows = tuple((batch, cpu[batch].text(1), wall[batch].text(1)) for batch in runs)
    batches = tuple(float(batch) for batch in runs)
    lines = (
        Line("CPU time", batches, tuple(each.median for each in cpu.values())),
        Line("time on the wall", batches, tuple(each.median for each in wall.values())),
    )
    most = max(runs)
    return Section(
        name="host",
        title="Cost of a token outside the model",
        how="The real worker loop and a real server; the model answers at once. CPU time of the worker's process "
        "outside `runner.run`, per token, over steps in which all sequences decode.",
        claims=(
            Claim(f"host cost at batch {most}, ceiling", cpu[most].median, MOST_US, "µs CPU a token"),
            Claim(f"host cost at batch {most}, aim", cpu[most].median, AIM_US, "µs CPU a token"),
        ),
        tables=(Table("Microseconds a token", ("batch", "CPU time", "wall, server included"), rows),),
        plots=(Plot("host_cost", "Outside the model", "batch", "µs per token", lines, log_x=True, log_y=True),),
        raw={str(batch): [asdict(each) for each in found] for batch, found in runs.items()},
    )
