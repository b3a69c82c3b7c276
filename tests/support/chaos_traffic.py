"""Requests of every kind through the client library, sync and async, each followed by a reader that keeps what it sees.

Every request has a thread or a task of its own: it adds its job when its time has come, through the library or by a
bare XADD, and then reads its stream to the end, now and then anew from a kept cursor. What a reader was told is
compared at the end with what an undisturbed run says (`Traffic.check`).
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import redis

from headrace.clients import AsyncClient, Client, HeadraceError, WaitTimeoutError
from headrace.clients.events import Event, Finished, Started, Tokens
from headrace.clients.keys import Keys, Priority
from tests.support.chaos_checker import require
from tests.support.chaos_load import Job
from tests.support.chaos_oracle import expected

_LOOK_S = 0.5  # how long a reader waits before it looks whether all is over
_PATIENCE_S = 30.0  # of a bare producer
# The last one: redis-py's asyncio client of a cluster closes connections that another task is about to write to.
_ERRORS = (redis.RedisError, redis.RedisClusterException, OSError, AttributeError)


@dataclass
class Request:
    """A request, and what became of it as its caller saw it."""

    id: str
    job: Job
    due_s: float  # behind the beginning
    priority: Priority
    is_bare: bool
    is_async: bool
    begun_ms: float = 0.0  # wall clock, before the first try to add it
    added_ms: float = 0.0  # and when it was acknowledged; 0: not yet
    entry_id: str = ""  # of the job's entry, where the library does not keep it to itself
    token_ids: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # by choice
    texts: dict[int, str] = field(default_factory=dict[int, str])
    seed: int | None = None
    is_whole: bool = False  # the reader has come to the end
    error: HeadraceError | None = None  # or was told that it cannot

    def take(self, event: Event) -> None:
        """What the reader was told next."""
        if isinstance(event, Started):
            self.seed = event.seed
        if isinstance(event, Tokens | Finished):
            self.token_ids.setdefault(event.choice, []).extend(event.token_ids)
            self.texts[event.choice] = self.texts.get(event.choice, "") + event.text

    def check(self) -> None:
        """Each token once and in order, as far as the reader came; a whole answer whole. Raises BrokenPromiseError."""
        if self.seed is None:
            require(not self.token_ids, f"{self.id}: tokens {self.token_ids} before any attempt")
            return
        for choice in range(self.job.get("n", 1)):
            ids, want = self.token_ids.get(choice, []), expected(self.job, self.seed, choice)
            whole = self.is_whole
            require(ids == want.token_ids[: len(ids)], f"{self.id}: a reader was told {ids} of {want.token_ids}")
            require(not whole or len(ids) == len(want.token_ids), f"{self.id}: an end after {ids}: {want.token_ids}")
            require(not whole or self.texts.get(choice, "") == want.text, f"{self.id}: {self.texts} is not {want.text}")


class Servers(Protocol):
    """Where the traffic goes."""

    def target(self, *, is_async: bool) -> Any:
        """What a client of the library is made with: an address, or a Redis client."""

    def raw_client(self, *, is_async: bool) -> Any:
        """A Redis client for bare jobs."""


class Traffic:
    """Everything that callers do, from the first job to the last reader's end."""

    def __init__(self, servers: Servers, prefix: str, jobs: Mapping[str, Job], over_s: float) -> None:
        self._servers = servers
        self._prefix = prefix
        self._keys = Keys(prefix, "default")
        self._at_rest = threading.Event()
        self._begun_s = time.monotonic()
        chance = random.Random(f"traffic {prefix} {len(jobs)}")
        self.requests = {
            name: Request(
                *(name, job, over_s * number / len(jobs), chance.choices(("high", "normal", "low"), (1, 8, 1))[0]),
                is_bare=chance.random() < 0.4,
                is_async=chance.random() < 0.5,
            )
            for number, (name, job) in enumerate(jobs.items())
        }
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guarded, args=(self._wait_all,), daemon=True)]
        self._threads += [threading.Thread(target=self._guarded, args=(self._await_all,), daemon=True)]
        for thread in self._threads:
            thread.start()

    @property
    def num_to_add(self) -> int:
        """Requests that are not acknowledged yet."""
        return sum(not each.added_ms for each in self.requests.values())

    def end(self, limit_s: float = 30.0) -> None:
        """Every job has ended: wait for the readers. Those that have not come to an end by then are told so."""
        self._at_rest.set()
        for thread in self._threads:
            thread.join(limit_s)
            assert not thread.is_alive(), "a reader hangs"
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what has gone wrong among the callers, if anything has."""
        if self._failures:
            raise AssertionError("a caller failed") from self._failures[0]

    def check(self) -> None:
        """What readers were told: nothing twice, nothing else. Raises BrokenPromiseError."""
        for request in self.requests.values():
            request.check()

    # --- what both kinds of callers do --------------------------------------------------------------------------------

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001  told by `raise_failure`
            self._failures.append(error)

    def _mine(self, *, is_async: bool) -> list[Request]:
        return [each for each in self.requests.values() if each.is_async is is_async]

    def _entry(self, request: Request) -> tuple[str, dict[Any, Any]]:
        return self._keys.jobs(request.priority), {"id": request.id, "json": json.dumps(request.job)}

    def _left_s(self, request: Request) -> float:
        return max(0.0, self._begun_s + request.due_s - time.monotonic())

    def _may_go_on(self, request: Request, error: HeadraceError) -> bool:
        """Whether a reader that was told an error only has to wait; keeps the error if not."""
        if isinstance(error, WaitTimeoutError) and not self._at_rest.is_set():
            return True
        request.error = error
        return False

    # --- those that wait ----------------------------------------------------------------------------------------------

    def _wait_all(self) -> None:
        raw = self._servers.raw_client(is_async=False)
        with Client(self._servers.target(is_async=False), prefix=self._prefix) as client:
            threads = []
            for request in self._mine(is_async=False):
                time.sleep(self._left_s(request))
                run = lambda each=request: self._serve(client, raw, each)  # noqa: E731
                threads.append(threading.Thread(target=self._guarded, args=(run,), daemon=True))
                threads[-1].start()
            for thread in threads:
                thread.join()
            raw.close()

    def _serve(self, client: Client, raw: Any, request: Request) -> None:
        request.begun_ms = time.time() * 1000
        if request.is_bare:
            end_s, (stream, entry) = time.monotonic() + _PATIENCE_S, self._entry(request)
            while True:
                try:
                    request.entry_id = raw.xadd(stream, entry).decode()
                    break
                except _ERRORS:
                    if time.monotonic() > end_s:
                        raise
                    time.sleep(0.05)
        else:
            client.submit(id=request.id, priority=request.priority, fmt="json", **request.job)
        request.added_ms = time.time() * 1000
        self._read(client, request)

    def _read(self, client: Client, request: Request) -> None:
        chance, cursor = random.Random(request.id), ""
        while not request.is_whole:
            with client.stream(request.id, cursor, timeout_s=_LOOK_S, raise_on_error=False) as stream:
                try:
                    for event in stream:
                        request.take(event)
                        if chance.random() < 0.03:
                            break
                    else:
                        request.is_whole = True
                except HeadraceError as error:
                    if not self._may_go_on(request, error):
                        return
                cursor = stream.cursor

    # --- those that are awaited ---------------------------------------------------------------------------------------

    def _await_all(self) -> None:
        asyncio.run(self._await_them())

    async def _await_them(self) -> None:
        raw, target = self._servers.raw_client(is_async=True), self._servers.target(is_async=True)
        async with AsyncClient(target, prefix=self._prefix) as client, asyncio.TaskGroup() as group:
            for request in self._mine(is_async=True):
                group.create_task(self._aserve(client, raw, request))
        await raw.aclose()

    async def _aserve(self, client: AsyncClient, raw: Any, request: Request) -> None:
        await asyncio.sleep(self._left_s(request))
        request.begun_ms = time.time() * 1000
        if request.is_bare:
            end_s, (stream, entry) = time.monotonic() + _PATIENCE_S, self._entry(request)
            while True:
                try:
                    request.entry_id = (await raw.xadd(stream, entry)).decode()
                    break
                except _ERRORS:
                    if time.monotonic() > end_s:
                        raise
                    await asyncio.sleep(0.05)
        else:
            await client.submit(id=request.id, priority=request.priority, fmt="json", **request.job)
        request.added_ms = time.time() * 1000
        await self._aread(client, request)

    async def _aread(self, client: AsyncClient, request: Request) -> None:
        chance, cursor = random.Random(request.id), ""
        while not request.is_whole:
            async with client.stream(request.id, cursor, timeout_s=_LOOK_S, raise_on_error=False) as stream:
                try:
                    async for event in stream:
                        request.take(event)
                        if chance.random() < 0.03:
                            break
                    else:
                        request.is_whole = True
                except HeadraceError as error:
                    if not self._may_go_on(request, error):
                        return
                cursor = stream.cursor
