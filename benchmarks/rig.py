"""The real thing: a server, a `headrace worker` process beside it, and jobs put in its queue."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import redis

from headrace.clients.keys import Keys
from headrace.clients.submission import build
from headrace.worker.child import end_child, start_child
from headrace.worker.embedded import EmbeddedServer, ServerOptions

from .processes import RunError, environment
from .workloads import Work

PREFIX = "headrace"
_PROGRAM = (sys.executable, "-c", "from headrace.worker.cli import main; main()")
_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker that serves."""

    pid: int
    keys: Keys


def server(*arguments: str, binary: Path | None = None) -> EmbeddedServer:
    """A new server without persistence, as `headrace worker --embedded` starts it; a context manager."""
    return EmbeddedServer(ServerOptions(binary=binary, arguments=arguments))


@contextmanager
def worker(url: str, model: Path, flags: Mapping[str, object], queue: str = "bench") -> Generator[RunningWorker]:
    """Run `headrace worker` until the block ends. Raises RunError if it does not come up, or ends by itself."""
    words = [str(part) for pair in flags.items() for part in pair]
    command = [*_PROGRAM, "worker", "--model", str(model), "--redis-url", url, "--queue", queue, *words]
    keys = Keys(PREFIX, queue)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        log = Path(folder) / "worker.log"
        with log.open("wb") as out:
            process = start_child(command, out, variables=environment())
        try:
            _wait_until_ready(url, keys, process, log)
            yield RunningWorker(process.pid, keys)
            if process.poll() is not None:
                raise RunError(f"the worker ended:\n{_tail(log)}")
        finally:
            end_child(process, _STOP_TIMEOUT_S)


def _wait_until_ready(url: str, keys: Keys, process: subprocess.Popen[bytes], log: Path) -> None:
    """Ready is when the worker has announced itself in its hash."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    with connect(url) as client:
        while not list(client.scan_iter(match=keys.worker_pattern, count=1000)):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RunError(f"the worker did not come up:\n{_tail(log)}")
            time.sleep(0.05)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def connect(url: str) -> Any:
    """A plain client that gives bytes, in the older of Redis' two protocols, whose replies have one shape."""
    any_redis = cast("Any", redis.Redis)
    return any_redis.from_url(url, protocol=2)


def job_options(work: Work) -> dict[str, Any]:
    """What a client asks for, so that exactly `num_out` tokens come."""
    return {"prompt_token_ids": work.prompt, "max_tokens": work.num_out, "temperature": 0.0, "ignore_eos": True}


def enqueue(url: str, keys: Keys, jobs: Iterable[tuple[str, Work]]) -> int:
    """Add bare jobs (id, work) without waiting for each: a thousand to a pipeline. Gives how many."""
    count, stream = 0, keys.jobs()
    made, made_of = None, None
    with connect(url) as client:
        waiting = iter(jobs)
        while part := list(islice(waiting, 1000)):
            pipeline = client.pipeline(transaction=False)
            for request_id, work in part:
                if made is None or work is not made_of:  # a million jobs may be the same work
                    made, made_of = build(job_options(work)), work
                pipeline.execute_command("XADD", stream, "*", "id", request_id, made.field, made.payload, "v", "1")
            pipeline.execute()
            count += len(part)
    return count
