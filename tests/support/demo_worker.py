"""A real worker process on the demo model, started by the command as a user would."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.clients.keys import Keys
from tests.support.command import PROGRAM
from tests.support.server import Server

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "assets" / "demo-model"
_numbers = itertools.count(1)


@dataclass
class DemoWorker:
    """A running worker: its queue (no other test uses it), its process, and where its standard error goes."""

    queue: str
    process: subprocess.Popen[bytes]
    log: Path


def wait_until_ready(server: Server, worker: DemoWorker, timeout_s: float = 60) -> None:
    """Wait until the worker has announced itself; fail with its log if it ends before that."""
    pattern = Keys("headrace", worker.queue).worker_pattern
    deadline_s = time.monotonic() + timeout_s
    with server.client() as client:
        while not list(client.scan_iter(match=pattern, count=1000)):
            if worker.process.poll() is not None:
                raise AssertionError(f"the worker ended with {worker.process.returncode}:\n{worker.log.read_text()}")
            if time.monotonic() > deadline_s:
                raise AssertionError(f"the worker is not ready after {timeout_s} s:\n{worker.log.read_text()}")
            time.sleep(0.05)


@contextmanager
def demo_worker(server: Server, tmp_path: Path, flags: Mapping[str, object] | None = None) -> Iterator[DemoWorker]:
    """Run `headrace worker --model demo` on a queue of its own; end it by SIGTERM and require exit code 0."""
    queue = f"demo-{os.getpid()}-{next(_numbers)}"
    log = tmp_path / f"{queue}.log"
    command = [*PROGRAM, "worker", "--model", "demo", "--queue", queue]
    command += ["--redis-url", server.url]
    command += [str(part) for pair in (flags or {}).items() for part in pair]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=tmp_path)
    worker = DemoWorker(queue, process, log)
    try:
        wait_until_ready(server, worker)
        yield worker
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
