"""What a queue looks like from outside: its workers, what waits, what runs, what has been given up. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import redis

from ..clients.keys import GROUP, PRIORITIES, Keys, is_valid_id

HANDED_BACK = "-"  # the consumer to which a draining worker gives what it has not finished


@dataclass(frozen=True, slots=True)
class LineStatus:
    """One of the three streams of jobs."""

    priority: str
    waiting: int  # added and not yet taken by a worker
    taken: int  # with a worker, or handed back by one
    oldest_waiting_s: float | None  # age of the oldest that waits, on the server's clock


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One consumer of the queue. `fields` is its hash as it stands there; empty for one that is gone but holds jobs."""

    name: str
    pending: int  # jobs that are its own
    fields: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def state(self) -> str:
        """What it says of itself; `gone` without a sign of life, `handed back` for jobs that wait for a worker."""
        if self.name == HANDED_BACK:
            return "handed back"
        return self.fields.get("state", "alive") if self.fields else "gone"

    @property
    def is_healthy(self) -> bool:
        """It has given a sign of life within its lease, and does not say that its step loop has stopped."""
        return bool(self.fields) and self.state != "stuck"


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A queue at one moment."""

    prefix: str
    queue: str
    lines: tuple[LineStatus, ...]
    workers: tuple[WorkerStatus, ...]
    dead: int


def read_status(client: redis.Redis, keys: Keys) -> QueueStatus:
    """Read a queue's state; `client` must not decode replies. A queue that nobody has used yet is an empty one.

    Raises redis.RedisError.
    """
    run = cast(Any, client).execute_command
    seconds, microseconds = (int(part) for part in run("TIME"))
    now_ms = seconds * 1000 + microseconds // 1000
    lines = tuple(_read_line(run, keys.jobs(priority), priority, now_ms) for priority in PRIORITIES)
    shown = tuple(each for each in read_workers(client, keys) if each.pending or each.fields)
    return QueueStatus(keys.prefix, keys.queue, lines, shown, int(run("XLEN", keys.dead)))


def read_workers(client: redis.Redis, keys: Keys) -> tuple[WorkerStatus, ...]:
    """Every consumer of the queue, also those without a sign of life and without a job. Raises redis.RedisError."""
    pending: dict[str, int] = {}
    for key in keys.all_jobs:
        for consumer in _info(cast(Any, client).execute_command, "CONSUMERS", key):
            name = _text(consumer["name"])
            pending[name] = pending.get(name, 0) + int(consumer["pending"])
    names = sorted(pending)
    with_hash = [name for name in names if name != HANDED_BACK and is_valid_id(name)]  # anybody may add a consumer
    pipeline: Any = cast(Any, client).pipeline(transaction=False)
    for name in with_hash:
        pipeline.hgetall(keys.worker(name))
    fields = {name: _as_fields(reply) for name, reply in zip(with_hash, pipeline.execute(), strict=True)}
    return tuple(WorkerStatus(name, pending[name], fields.get(name, {})) for name in names)


def _read_line(run: Any, key: str, priority: str, now_ms: int) -> LineStatus:
    length = int(run("XLEN", key))
    group = next((each for each in _info(run, "GROUPS", key) if each["name"].decode() == GROUP), None)
    taken = int(group["pending"]) if group else 0
    last_taken = group["last-delivered-id"].decode() if group else "0-0"
    oldest = run("XRANGE", key, f"({last_taken}", "+", "COUNT", 1)
    age_s = max(0, now_ms - int(oldest[0][0].partition(b"-")[0])) / 1000 if oldest else None
    return LineStatus(priority, max(0, length - taken), taken, age_s)


def _info(run: Any, what: str, key: str) -> list[dict[str, Any]]:
    arguments = (key, GROUP) if what == "CONSUMERS" else (key,)
    try:
        rows = run(f"XINFO {what}", *arguments)
    except redis.ResponseError as error:
        if "no such key" in str(error).lower() or "NOGROUP" in str(error):
            return []  # no job has been added and no worker has started yet
        raise
    return [{_text(name): value for name, value in pairs(row)} for row in rows]


def pairs(row: Any) -> list[tuple[Any, Any]]:
    """A row as redis-py gives it: a map, or names and values in turn."""
    return (
        list(cast(dict[Any, Any], row).items())
        if isinstance(row, dict)
        else list(zip(row[::2], row[1::2], strict=True))
    )


def _as_fields(reply: Any) -> Mapping[str, str]:
    return {_text(name): _text(value) for name, value in pairs(reply)}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
