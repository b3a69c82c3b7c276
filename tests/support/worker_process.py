"""Real worker processes on the scripted model, started in a fraction of a second, ended with the test.

Fixture `start_worker`: `start_worker(server_or_proxy, prefix, **options)` gives a running `WorkerProcess`; it waits
until the worker has announced itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

ROOT = Path(__file__).resolve().parents[2]


class WorkerProcess:
    """One worker as a process."""

    def __init__(self, url: str, prefix: str, log: Path, **options: object) -> None:
        settings = {"url": url, "prefix": prefix, **options}
        arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        path = os.pathsep.join(each for each in sys.path if each)
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.scripted_worker", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=log.open("wb"),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        """What it has logged so far."""
        return self.log.read_text(errors="replace")

    def wait_ready(self, timeout_s: float = 15.0) -> None:
        """Wait until it serves."""
        end_s = time.monotonic() + timeout_s
        while "event=ready" not in self.output():
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise AssertionError(f"the worker did not start:\n{self.output()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()

    def stop(self, times: int = 1) -> None:
        """SIGTERM, so many times."""
        for _ in range(times):
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.02)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def wait(self, timeout_s: float = 20.0) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(timeout_s)


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """`start_worker(server, prefix, **options)`: a worker that serves when this returns; `wait=False` does not wait."""
    started: list[WorkerProcess] = []

    def start(server: object, prefix: str, *, wait: bool = True, **options: object) -> WorkerProcess:
        url = server if isinstance(server, str) else server.url  # type: ignore[attr-defined]
        log = tmp_path / f"worker-{len(started)}.log"
        process = WorkerProcess(url, prefix, log, **options)
        started.append(process)
        if wait:
            process.wait_ready()
        return process

    yield start
    for each in started:
        if each.process.poll() is None:
            each.thaw()
            each.kill()


def wait_until(condition: Callable[[], object], timeout_s: float = 15.0, what: str = "") -> None:
    """Wait until a condition holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.005)


def is_done(client: redis.Redis, out: str) -> bool:
    """Whether a request's stream has its terminal entry (as JSON or msgpack, both hold the word)."""
    newest = client.xrevrange(out, count=1)
    return bool(newest) and b"done" in b"".join(newest[0][1].values())
