"""The command `headrace` in tests, called or as a process, and a worker played by hand."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest
import redis

from headrace.clients.entries import encode
from headrace.clients.keys import GROUP, Keys
from headrace.worker.cli import run
from headrace.worker.command import known_variables
from tests.support.server import Server

ENVIRONMENT = {
    # PYTHONUNBUFFERED would hide that a command forgets to flush.
    **{name: value for name, value in os.environ.items() if name not in known_variables() | {"PYTHONUNBUFFERED"}},
    "PYTHONPATH": os.pathsep.join(sys.path),
}
PROGRAM = [sys.executable, "-c", "from headrace.worker.cli import main; main()"]
FINGERPRINT = "0" * 64


Spawn = Callable[..., "subprocess.Popen[str]"]


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line on stderr."""
        assert self.err.count("\n") == 1 and self.err.endswith("\n"), self.err
        assert "Traceback" not in self.err
        return self.err.rstrip("\n")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run a command line in this process; the machine's own variables are no part of it."""
    for name in known_variables():
        monkeypatch.delenv(name, raising=False)

    def run_it(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = run(arguments)
        return Outcome(code, *capsys.readouterr())

    return run_it


class Scribe:
    """Plays a worker by hand: takes one job and writes the entries that a test wants, as the protocol has them."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.client = server.client()
        self.keys = keys
        self.job: dict[str, Any] = {}

    def take(self) -> str:
        """Wait for the next job; give its request's id."""
        for jobs in self.keys.all_jobs:
            with contextlib.suppress(redis.ResponseError):  # it is there
                self.client.xgroup_create(jobs, GROUP, "0", mkstream=True)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for jobs in self.keys.all_jobs:
                reply: Any = self.client.xreadgroup(GROUP, "scribe", {jobs: ">"}, count=1)
                if reply:
                    [(stream, [(entry_id, fields)])] = reply
                    self.job = msgpack.unpackb(fields[b"job"])
                    self.entry = f"{stream.decode()} {entry_id.decode()}"
                    self.fp = fields[b"fp"].decode()
                    return fields[b"id"].decode()
            time.sleep(0.01)
        raise TimeoutError("no job came")

    def write(self, request_id: str, number: int, **fields: Any) -> None:
        """Write entry A-`number` of attempt A."""
        self.client.xadd(self.keys.out(request_id), dict([encode(fields, "d")]), id=f"{self.attempt}-{number}")

    def begin(self, request_id: str) -> None:
        """Write `started`."""
        self.attempt = int(time.time() * 1000) + 1
        model = {"name": "scribe", "fingerprint": FINGERPRINT}
        head = {"attempt": 1, "worker": "scribe", "job": self.entry, "resumed": [], "seed": 1}
        self.write(request_id, 0, e="started", **head, fp=self.fp, model=model)

    def answer(self, texts: Sequence[str], **last: Any) -> str:
        """Take a job and answer it with one token for each text; give the request's id."""
        request_id = self.take()
        self.begin(request_id)
        for i, text in enumerate(texts):
            self.write(request_id, i + 1, e="tokens", i=i, t=[i], x=text)
        usage = {"prompt": 1, "completion": len(texts), "cached": 0}
        self.write(
            request_id, len(texts) + 1, **{"e": "finished", "reason": "stop", "usage": usage, "done": True, **last}
        )
        return request_id


@pytest.fixture
def keys(prefix: str, queue: str) -> Keys:
    """Keys that no other test uses."""
    return Keys(prefix, queue)


@pytest.fixture
def place(server: Server, keys: Keys) -> list[str]:
    """Flags that name the server and these keys."""
    return ["--redis-url", server.url, "--queue", keys.queue, "--prefix", keys.prefix]


@pytest.fixture
def scribe(server: Server, keys: Keys) -> Scribe:
    """A worker played by hand."""
    return Scribe(server, keys)


@pytest.fixture
def answering(scribe: Scribe) -> Iterator[Callable[..., None]]:
    """`answering(texts, **last)` answers the next job from a thread."""
    threads: list[threading.Thread] = []

    def start(texts: Sequence[str], **last: Any) -> None:
        threads.append(threading.Thread(target=scribe.answer, args=(texts,), kwargs=last))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(10)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """`spawn(*arguments, variables={}, **options)`: the command as a process, killed if the test leaves it."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, variables: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**ENVIRONMENT, **(variables or {})},
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
