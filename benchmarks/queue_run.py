"""A workload through Redis: a real server, a real worker, every job submitted, all streams read by one reader.

    python -m benchmarks.queue_run W1 --model DIR [--limit N] [--budget N] [--submit client|bare]

The wall runs from the first submission to the last terminal entry that the reader has seen; CPU seconds are those of
the worker, of the server, and of this process, which submits and reads, over the same time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.clients import Client, Finished, Tokens

from .multiplexer import PAUSE_S, Multiplexer
from .pairs import Cost
from .processes import RunError, Stopwatch, cpu_seconds, print_result
from .rig import RunningWorker, enqueue, job_options, server, worker
from .settings import Settings, fresh_workload
from .workloads import WORKLOADS, Work, warm_up


@dataclass(frozen=True, slots=True)
class QueueRun:
    """One run."""

    workload: str
    wall_s: float
    worker_cpu_s: float
    server_cpu_s: float
    client_cpu_s: float  # submitting and reading
    submit_s: float  # wall seconds until all jobs were submitted
    tokens_in: int
    tokens_out: int
    entries: int  # that the reader took, besides `queued` and `started`

    @property
    def cost(self) -> Cost:
        """Seconds, and the CPU seconds of worker and server: readers are reported apart."""
        return Cost(self.wall_s, self.worker_cpu_s + self.server_cpu_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one workload and print one line of JSON."""
    given = _arguments(arguments)
    workload = WORKLOADS[given.workload]
    flags = {
        "--dtype": given.dtype,
        "--max-num-seqs": given.max_num_seqs or workload.max_num_seqs,
        "--max-num-batched-tokens": given.budget,
        "--num-kv-blocks": workload.num_kv_blocks,
    }
    work = workload.make()[: given.limit]
    bare = given.submit == "bare"
    with server() as valkey, worker(valkey.url, given.model, flags) as running:
        multiplexer = Multiplexer(valkey.url, running.keys, given.pause_s)
        _serve(valkey.url, running, multiplexer, warm_up(), "warm-up", bare)
        before = cpu_seconds(running.pid), cpu_seconds(valkey.pid)
        watch = Stopwatch()
        submit_s, entries = _serve(valkey.url, running, multiplexer, work, "run", bare)
        elapsed = watch.read()
        after = cpu_seconds(running.pid), cpu_seconds(valkey.pid)
        multiplexer.close()
    print_result(
        QueueRun(
            workload=workload.name,
            wall_s=elapsed.wall_s,
            worker_cpu_s=after[0] - before[0],
            server_cpu_s=after[1] - before[1],
            client_cpu_s=elapsed.cpu_s,
            submit_s=submit_s,
            tokens_in=sum(len(each.prompt) for each in work),
            tokens_out=sum(each.num_out for each in work),
            entries=entries,
        )
    )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue_run")
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--limit", type=int, default=None, help="only so many requests")
    parser.add_argument("--budget", type=int, default=512, help="most tokens in one step")
    parser.add_argument("--max-num-seqs", type=int, default=None, help="most requests at once")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--submit", choices=("client", "bare"), default="client", help="how jobs are put in")
    parser.add_argument("--pause-s", type=float, default=PAUSE_S, help="the reader's pause after each reply")
    return parser.parse_args(arguments)


def _serve(
    url: str, running: RunningWorker, multiplexer: Multiplexer, work: Sequence[Work], name: str, bare: bool
) -> tuple[float, int]:
    """Submit everything, read it to its end. Gives the seconds until all was submitted, and the entries read."""
    watch = Stopwatch()
    wanted = {f"{name}-{number}": each for number, each in enumerate(work)}
    if bare:
        enqueue(url, running.keys, wanted.items())
    else:
        with Client(url, prefix=running.keys.prefix, queue=running.keys.queue) as client:
            for request_id, each in wanted.items():
                client.submit(id=request_id, **job_options(each))
    submit_s = watch.read().wall_s
    multiplexer.follow(wanted)
    tokens, entries = dict.fromkeys(wanted, 0), 0
    while multiplexer.open:
        for request_id, event in multiplexer.read():
            if isinstance(event, (Tokens, Finished)):
                entries += 1
                tokens[request_id] += len(event.token_ids)
    wrong = {key: count for key, count in tokens.items() if count != wanted[key].num_out}
    if wrong:
        raise RunError(f"{len(wrong)} requests gave another number of tokens than was asked: {list(wrong.items())[:3]}")
    return submit_s, entries


def fresh_run(settings: Settings, workload: str, quick_limit: int) -> QueueRun:
    """Run in new processes. `quick_limit` requests are left of the workload in a quick run."""
    return fresh_workload(QueueRun, "benchmarks.queue_run", settings, workload, quick_limit)


if __name__ == "__main__":
    main()
