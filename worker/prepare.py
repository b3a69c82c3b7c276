"""A small pool of threads for rendering and tokenising, so that nobody waits for a neighbour's megabyte of prompt.

A thread cannot be ended from outside. One whose work takes longer than allowed is given up: its ticket comes back as
timed out, its late result is dropped, and another thread takes its place, up to a limit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_MOST_HUNG = 8


class PrepareTimeoutError(Exception):
    """The work took longer than allowed."""


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    ticket: object
    work: Callable[[], T]
    started_s: float | None = None
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class Prepared(Generic[T]):
    """One result: `error` is set where there is no `value`."""

    ticket: object
    value: T | None = None
    error: Exception | None = None


def at_once(ticket: object, work: Callable[[], T]) -> Prepared[T]:
    """Do the work here."""
    try:
        return Prepared(ticket, work())
    except Exception as error:  # noqa: BLE001  whatever a tokenizer raises is the request's, not the thread's
        return Prepared(ticket, error=error)


@dataclass(eq=False)
class PreparePool(Generic[T]):
    """Runs work on `num_threads` daemon threads; `wake` is called (on such a thread) when a result is there."""

    num_threads: int
    timeout_s: float
    wake: Callable[[], None]

    def __post_init__(self) -> None:
        self._waiting: queue.SimpleQueue[_Job[T] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Prepared[T]] = queue.SimpleQueue()
        self._open: set[_Job[T]] = set()
        self._lock = threading.Lock()  # around the two numbers
        self._num_all = 0  # threads
        self._num_hung = 0  # of these, threads whose work was given up and goes on
        self._fill_up()

    def _fill_up(self) -> None:
        """Start threads until enough are free, or too many hang."""
        with self._lock:
            while self._num_all - self._num_hung < self.num_threads and self._num_hung <= _MOST_HUNG:
                threading.Thread(target=self._run, name="headrace-prepare", daemon=True).start()
                self._num_all += 1

    def __len__(self) -> int:
        """Number of tickets whose result has not been fetched."""
        return len(self._open)

    def submit(self, ticket: object, work: Callable[[], T]) -> None:
        """Queue work; its result comes out of `done` under `ticket`."""
        job = _Job(ticket, work)
        self._open.add(job)
        self._waiting.put(job)

    def done(self) -> list[Prepared[T]]:
        """Results that came in since the last call, and tickets that ran out of time."""
        out: list[Prepared[T]] = []
        while True:
            try:
                out.append(self._results.get_nowait())
            except queue.Empty:
                break
        finished = {id(each.ticket) for each in out}
        self._open = {job for job in self._open if id(job.ticket) not in finished}
        return out + self._overdue()

    def _overdue(self) -> list[Prepared[T]]:
        now_s = time.monotonic()
        late = {job for job in self._open if job.started_s is not None and now_s - job.started_s > self.timeout_s}
        for job in late:
            job.given_up = True
        with self._lock:
            self._num_hung += len(late)
            none_free = self._num_hung >= self._num_all
        if late:
            self._fill_up()
        if none_free and self._num_hung > _MOST_HUNG:
            for job in self._open:  # nobody is left to begin with these
                job.given_up = True
            late = self._open
        self._open = self._open - late
        return [Prepared(job.ticket, error=PrepareTimeoutError()) for job in late]

    def close(self) -> None:
        """End the threads as soon as they are idle."""
        for _ in range(self._num_all):
            self._waiting.put(None)

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            if job.given_up:
                continue
            job.started_s = time.monotonic()
            result = at_once(job.ticket, job.work)
            if job.given_up:
                if self._is_spare():
                    return
            else:
                self._results.put(result)
                self.wake()

    def _is_spare(self) -> bool:
        """This thread hung and does no more: whether another has taken its place."""
        with self._lock:
            self._num_hung -= 1
            spare = self._num_all - self._num_hung > self.num_threads
            self._num_all -= spare
            return spare
