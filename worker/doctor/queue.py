"""The queue as its node has it: lines, workers, what is pending, what was given up."""

from __future__ import annotations

from typing import Any, Final

import redis

from ...clients.keys import GROUP, PRIORITIES, Keys
from ..clock import server_s
from ..status import LineStatus, pairs, read_status, read_workers
from .node import Node
from .seen import LineSeen, Pending, QueueSeen

_PER_READ: Final = 500
MAX_PENDING: Final = 5_000  # of each line; the oldest


def read_queue(node: Node, keys: Keys) -> QueueSeen:
    """Read it. Raises redis.RedisError."""
    names = (*keys.all_jobs, keys.dead)
    types = [reply.decode() for reply in _granted(node.ask(*(("TYPE", name) for name in names)))]
    foreign = tuple(pair for pair in zip(names, types, strict=True) if pair[1] not in {"stream", "none"})
    if foreign:
        return QueueSeen(foreign=foreign)
    status = read_status(node.client, keys)
    time, *streams = node.ask(("TIME",), *(("XINFO", "STREAM", name) for name in names))
    now_s = server_s(time)
    *lines, (_, dead_ahead_s) = (_ages(reply, now_s) for reply in streams)
    return QueueSeen(
        lines=tuple(
            _line(node, keys.jobs(priority), line, ages)
            for priority, line, ages in zip(PRIORITIES, status.lines, lines, strict=True)
        ),
        workers=read_workers(node.client, keys),
        num_dead=status.dead,
        newest_dead_ahead_s=dead_ahead_s,
    )


def _line(node: Node, key: str, status: LineStatus, ages: tuple[float | None, float]) -> LineSeen:
    return LineSeen(key, status, *ages, pending=tuple(_read_pending(node, key)))


def _ages(reply: Any, now_s: float) -> tuple[float | None, float]:
    """Of a stream: the age of its oldest entry, and how far its newest id is ahead of the clock, in seconds."""
    if isinstance(reply, redis.ResponseError):
        if "no such key" in str(reply).lower():
            return None, 0.0
        raise reply
    fields = {name.decode(): value for name, value in pairs(reply)}
    oldest = fields["first-entry"]
    return _age_s(oldest[0], now_s) if oldest else None, -_age_s(fields["last-generated-id"], now_s)


def _age_s(entry_id: bytes, now_s: float) -> float:
    return now_s - int(entry_id.partition(b"-")[0]) / 1000


def _read_pending(node: Node, key: str) -> list[Pending]:
    """The oldest entries that are taken, without a look at what they hold."""
    found: list[Pending] = []
    start: str | bytes = "-"
    while len(found) < MAX_PENDING:
        [rows] = node.ask(("XPENDING", key, GROUP, start, "+", _PER_READ))
        if isinstance(rows, redis.ResponseError):
            if "NOGROUP" in str(rows) or "no such key" in str(rows).lower():
                break
            raise rows
        found += [Pending(row[1].decode("utf-8", "replace"), int(row[2]) / 1000) for row in rows]
        if len(rows) < _PER_READ:
            break
        start = b"(" + rows[-1][0]
    return found


def _granted(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, redis.ResponseError):
            raise outcome
    return outcomes
