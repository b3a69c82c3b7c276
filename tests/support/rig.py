"""A queue on a real server, and workers on the scripted model beside it: fixtures `rig` and `rig_on`.

After each test the protocol's invariants are checked over everything that lies under the rig's prefix.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
import redis

from headrace.clients.events import Event, Finished, Started
from headrace.clients.keys import Keys, Priority
from headrace.engine.engine import Engine
from headrace.engine.types import EngineConfig, ModelInfo, Tokenizer
from headrace.worker.control import Control
from headrace.worker.options import WorkerSettings
from headrace.worker.service import Service
from tests.support.invariants import Told, check_all, events_of, told
from tests.support.scripted import ByteTokenizer, ScriptedRunner
from tests.support.server import Server
from tests.support.worker_process import wait_until

MODEL = ModelInfo("scripted", "f" * 64)


class ListLog:
    """Keeps log events."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, object]]] = []

    def info(self, event: str, **fields: object) -> None:
        self.lines.append(("info", event, fields))

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append(("warning", event, fields))

    def error(self, event: str, **fields: object) -> None:
        self.lines.append(("error", event, fields))


class ThreadWorker:
    """A worker in this process, on a thread of its own."""

    def __init__(
        self,
        settings: WorkerSettings,
        runner: ScriptedRunner,
        config: EngineConfig,
        model: ModelInfo,
        tokenizer: Tokenizer,
    ) -> None:
        self.control = Control()
        self.log = ListLog()
        self.runner = runner
        self.engine = Engine(runner, config)
        self.service = Service(self.engine, tokenizer, model, settings, control=self.control, log=self.log)
        self.exit_code: int | None = None
        self.error: BaseException | None = None
        self.service.start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.exit_code = self.service.run()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.service.close()

    @property
    def name(self) -> str:
        return self.service.context.worker

    @property
    def counters(self) -> Any:
        return self.service.context.counters

    def stop(self, times: int = 1, timeout_s: float = 20.0) -> int | None:
        """Drain, and wait for the end."""
        for _ in range(times):
            self.control.request_stop()
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 20.0) -> int | None:
        self._thread.join(timeout_s)
        if self.error is not None:
            raise AssertionError("the worker's loop ended with an error") from self.error
        assert not self._thread.is_alive(), "the worker does not end"
        return self.exit_code

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()


@dataclass
class Rig:
    """The queue `default` under a prefix of its own."""

    server: Server
    prefix: str
    client: redis.Redis
    submitted: list[str] = field(default_factory=list)
    open_ids: set[str] = field(default_factory=set)
    workers: list[ThreadWorker] = field(default_factory=list)
    check_at_end: bool = True

    def __post_init__(self) -> None:
        self.keys = Keys(self.prefix, "default")

    def add(
        self,
        request_id: str,
        job: Mapping[str, Any] | bytes | str,
        *,
        kind: str = "json",
        priority: Priority = "normal",
        fields: Mapping[str, Any] | None = None,
        entry_id: str = "*",
    ) -> str:
        """Add a job as anyone could, by a bare XADD; the id of its entry."""
        payload: Any = job
        if isinstance(job, Mapping):
            payload = json.dumps(job) if kind == "json" else msgpack.packb(job)
        entry = {"id": request_id, kind: payload, **(fields or {})}
        self.submitted.append(request_id)
        return self.client.xadd(self.keys.jobs(priority), entry, id=entry_id).decode()

    def submit(self, request_id: str, job: Mapping[str, Any]) -> str:
        """Add a job as a client library does: `queued` first, which lives for a day, then the job with its `fp`."""
        payload = json.dumps(job).encode()
        fp, out = hashlib.sha256(payload).hexdigest(), self.keys.out(request_id)
        queued = json.dumps({"e": "queued", "fp": fp})
        self.client.xadd(out, {"json": queued}, id=f"0-{int(time.time() * 1000)}")
        self.client.pexpire(out, 86_400_000)
        return self.add(request_id, payload, fields={"fp": fp})

    def events(self, request_id: str) -> list[Event]:
        return events_of(self.client, self.keys.out(request_id))

    def started(self, request_id: str) -> list[Started]:
        return [event for event in self.events(request_id) if isinstance(event, Started)]

    def raw(self, request_id: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return self.client.xrange(self.keys.out(request_id))

    def last(self, request_id: str) -> Event | None:
        events = self.events(request_id)
        return events[-1] if events else None

    def is_done(self, request_id: str) -> bool:
        last = self.last(request_id)
        return isinstance(last, Finished) and last.done

    def wait_done(self, *request_ids: str, timeout_s: float = 15.0) -> Finished:
        """Wait until requests have ended; the terminal entry of the last one."""
        for request_id in request_ids:
            wait_until(lambda each=request_id: self.is_done(each), timeout_s, f"{request_id} ends")
        last = self.last(request_ids[-1])
        assert isinstance(last, Finished)
        return last

    def wait_empty(self, timeout_s: float = 15.0) -> None:
        """Wait until no job is left."""
        wait_until(lambda: self.num_jobs() == 0, timeout_s, "no job is left")

    def num_jobs(self) -> int:
        return sum(self.client.xlen(key) for key in self.keys.all_jobs)

    def told(self, request_id: str) -> dict[int, Told]:
        return told(self.events(request_id))

    def num_tokens(self, request_id: str) -> int:
        return sum(len(choice.token_ids) for choice in self.told(request_id).values())

    def wait_tokens(self, request_id: str, count: int, timeout_s: float = 15.0) -> None:
        wait_until(lambda: self.num_tokens(request_id) >= count, timeout_s, f"{count} tokens of {request_id}")

    def dead(self) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in self.client.xrange(self.keys.dead)]

    def pending(self, priority: Priority = "normal") -> list[dict[str, Any]]:
        return self.client.xpending_range(self.keys.jobs(priority), "workers", "-", "+", 1000)

    def worker(
        self,
        *,
        runner: ScriptedRunner | None = None,
        max_num_seqs: int = 32,
        model: ModelInfo = MODEL,
        url: str | None = None,
        step_time_s: float = 0.0,
        script: Any = "hash",
        tokenizer: Tokenizer | None = None,
        **settings: Any,
    ) -> ThreadWorker:
        """A worker on a thread; stopped at the end of the test."""
        defaults = {"url": url or self.server.url, "prefix": self.prefix, "lease_s": 10.0}
        runner = runner or ScriptedRunner(script=script, step_time_s=step_time_s, num_blocks=512, max_model_len=2048)
        config = EngineConfig(max_num_seqs=max_num_seqs)
        worker = ThreadWorker(
            WorkerSettings(**{**defaults, **settings}), runner, config, model, tokenizer or ByteTokenizer()
        )
        self.workers.append(worker)
        return worker

    def check(self) -> None:
        """All invariants, once acknowledgements have had the time to follow their terminal entries."""
        wait_until(lambda: not self._ended_jobs(), 5.0, "ended requests leave the queue")
        check_all(self.client, self.prefix, self.submitted, open_ids=self.open_ids)

    def close(self) -> None:
        """Stop the workers, check, and leave nothing behind."""
        for worker in self.workers:
            if worker.is_alive:
                worker.stop(2)
        if self.check_at_end:
            self.check()
        self.client.close()

    def _ended_jobs(self) -> list[str]:
        ids = [
            fields.get(b"id", b"").decode("utf-8", "replace")
            for key in self.keys.all_jobs
            if self.client.exists(key)
            for _, fields in self.client.xrange(key)
        ]
        return [each for each in ids if each in self.submitted and self.is_done(each)]


def abandon(rig: Rig, request_id: str, job: Mapping[str, Any] | None = None) -> str:
    """A job taken by a worker that died before it began it, longer ago than any lease; the id of its entry."""
    jobs = rig.keys.jobs()
    if not rig.client.exists(jobs):
        rig.client.xgroup_create(jobs, "workers", "0", mkstream=True)
    entry_id = rig.add(request_id, job or {"prompt": "Hello", "max_tokens": 30, "seed": 3, "ignore_eos": True})
    rig.client.xreadgroup("workers", "dead-worker", {jobs: ">"})
    rig.client.xclaim(jobs, "workers", "dead-worker", 0, [entry_id], idle=10**9, justid=True)
    return entry_id


@pytest.fixture
def rig(server: Server, prefix: str) -> Iterator[Rig]:
    """A queue on the shared server; after the test the invariants are checked over all of it."""
    made = Rig(server, prefix, server.client())
    yield made
    made.close()
    with server.client() as client:
        keys = list(client.scan_iter(match=f"{prefix}:*", count=1000))
        if keys:
            client.delete(*keys)


@pytest.fixture
def rig_on() -> Iterator[Callable[[Server], Rig]]:
    """`rig_on(server)`: a queue on a server of the test's own; checked after the test as well."""
    made: list[Rig] = []

    def make(server: Server) -> Rig:
        made.append(Rig(server, f"own{len(made)}", server.client()))
        return made[-1]

    yield make
    for each in made:
        each.close()
