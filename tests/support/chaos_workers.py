"""Worker processes of the chaos suite, as a test sees them: started in milliseconds, killed, stopped, told to end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.worker_process import ROOT

LEASE_S = 1.0


class Nursery:
    """The program that forks workers (`chaos_nursery`); ends with them on `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._num_spawned = 0
        path = os.pathsep.join(each for each in sys.path if each)
        with (folder / "nursery.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.chaos_nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
            )

    def spawn(self, url: str, prefix: str, **options: Any) -> Worker:
        """Start a worker. It need not be ready when this returns."""
        with self._lock:
            self._num_spawned += 1
            log = self._folder / f"worker-{self._num_spawned}.log"
        settings = {"url": url, "prefix": prefix, "lease_s": LEASE_S, "socket_timeout_s": 1.0, **options}
        answer = self._ask({"spawn": settings, "log": str(log)})
        return Worker(self, answer["pid"], log)

    def reap(self, pid: int) -> int | None:
        """The exit code of a worker that has ended (below 0: the signal), None while it runs."""
        code: int | None = self._ask({"reap": pid})["code"]
        return code

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, "the nursery has ended: see nursery.log"
            answer: dict[str, Any] = json.loads(line)
            return answer

    def close(self) -> None:
        """End, and every worker with it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


class Worker:
    """One worker process."""

    def __init__(self, nursery: Nursery, pid: int, log: Path) -> None:
        self._nursery = nursery
        self.pid = pid
        self.log = log
        self.code: int | None = None  # once it was seen to have ended
        self.num_freezes = 0

    def output(self) -> str:
        """What it has said so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def name(self) -> str:
        """Its name as a consumer; waits until it serves."""
        self.wait_ready()
        match = re.search(r"event=ready .*?worker=(\S+)", self.output())
        assert match, self.output()
        return match[1]

    def counter(self, name: str) -> int:
        """A counter of one that has ended in order."""
        match = re.search(rf"event=ended .*?\b{name}=(\d+)", self.output())
        assert match, self.output()
        return int(match[1])

    def wait_ready(self) -> None:
        """Wait until it serves."""
        if not self.is_serving():
            raise AssertionError(f"the worker did not start:\n{self.output()}")

    def is_serving(self, timeout_s: float = 20.0) -> bool:
        """Wait until it serves, or has ended before."""
        end_s = time.monotonic() + timeout_s
        while "event=ready" not in self.output():
            if not self.is_alive or time.monotonic() > end_s:
                return False
            time.sleep(0.005)
        return True

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        if self.code is None:
            self.code = self._nursery.reap(self.pid)
        return self.code is None

    @property
    def was_killed(self) -> bool:
        """Whether it has ended by SIGKILL."""
        return not self.is_alive and self.code == -signal.SIGKILL

    @property
    def is_frozen(self) -> bool:
        """Whether it is stopped."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def kill(self) -> None:
        """End it as a crash would."""
        self._signal(signal.SIGKILL)
        self.wait()

    def freeze(self) -> None:
        """Let it stand still."""
        self.num_freezes += 1
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def stop(self, times: int = 1) -> None:
        """SIGTERM, so many times."""
        for _ in range(times):
            self._signal(signal.SIGTERM)
            time.sleep(0.02)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for its end; the exit code, below 0 the signal that ended it."""
        end_s = time.monotonic() + timeout_s
        while self.is_alive:
            assert time.monotonic() < end_s, f"worker {self.pid} does not end:\n{self.output()[-3000:]}"
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive:  # one that was not reaped keeps its number: nobody else can be hit
            os.kill(self.pid, number)
