"""What may be wrong with a server. Each check is a function of what was seen of one node."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Final

from ..server_check import evicting, too_old
from ..units import show_bytes
from .findings import Finding, error, warning
from .seen import NodeSeen

_SLOW_S: Final = 0.1  # a round trip
_SLOW_MEDIAN_S: Final = 0.02
_NUM_SLOW: Final = 2  # so many slow ones are no accident
_CLOCK_S: Final = 2.0
_FULL, _NEARLY_FULL = 0.9, 0.75  # of the memory
_MOST_CONNECTIONS: Final = 0.9


def unreachable(node: NodeSeen) -> Iterator[Finding]:
    """It does not answer."""
    if node.error:
        yield error("unreachable", f"the server does not answer: {node.error}", "start it, or mend the way to it")


def version(node: NodeSeen) -> Iterator[Finding]:
    """Too old for the scripts and commands of the protocol."""
    trouble = too_old(node.info) if node.info else None
    if trouble is not None:
        yield error("version", *trouble)


def replica(node: NodeSeen) -> Iterator[Finding]:
    """A replica takes no writes."""
    if node.info.get("role") == "slave":
        master = f"{node.info.get('master_host', '?')}:{node.info.get('master_port', '?')}"
        yield error("replica", f"the server is a replica of {master} and takes no writes", f"use redis://{master}")


def policy(node: NodeSeen) -> Iterator[Finding]:
    """A server that evicts keys may delete jobs."""
    trouble = evicting(node.info)
    if trouble is not None:
        yield error("policy", trouble[0], f"{trouble[1]}, and set it in the server's configuration")


def memory(node: NodeSeen) -> Iterator[Finding]:
    """No limit, or near it: at the limit nothing can be submitted and no token written."""
    used, limit = node.number("used_memory"), node.number("maxmemory")
    if node.info and not limit:
        yield warning(
            "maxmemory",
            "the server has no maxmemory: it grows until the system ends it, and all that it does not keep on disk",
            "run CONFIG SET maxmemory with what the machine can spare (docs/operations.md has a formula)",
        )
    limit = limit or node.number("total_system_memory")
    if limit and used / limit >= _NEARLY_FULL:
        make = error if used / limit >= _FULL else warning
        yield make(
            "memory",
            f"{show_bytes(used)} of {show_bytes(limit)} are in use ({used / limit:.0%}); "
            "at the limit nothing can be submitted and workers stand still",
            "raise maxmemory, purge dead jobs, lower --result-ttl, or submit more slowly",
        )


def persistence(node: NodeSeen) -> Iterator[Finding]:
    """What a crash of the server would lose, and whether it can write at all."""
    if node.info.get("aof_enabled") == "0":
        yield warning(
            "append-only",
            "the append-only file is off: if the server ends, jobs and answers since its last snapshot are lost",
            "run CONFIG SET appendonly yes, and set it in the server's configuration",
        )
    failed = [
        (what, make)
        for name, what, make in (
            ("rdb_last_bgsave_status", "the last snapshot", error),
            ("aof_last_write_status", "the last write to the append-only file", error),
            ("aof_last_bgrewrite_status", "the last rewrite of the append-only file", warning),
        )
        if node.info.get(name, "ok") != "ok"
    ]
    for what, make in failed:
        yield make(
            "save",
            f"{what} failed: the server may refuse writes until one succeeds (MISCONF)",
            "look at the server's log; the disk may be full, or its folder not writable",
        )


def connections(node: NodeSeen) -> Iterator[Finding]:
    """Each reader of a stream and each worker holds some."""
    used, most = node.number("connected_clients"), node.number("maxclients")
    if most and used / most >= _MOST_CONNECTIONS:
        yield warning(
            "connections",
            f"{used} of {most} connections are in use: further readers and workers will be turned away",
            "run CONFIG SET maxclients with more, or look for clients that never close (CLIENT LIST)",
        )


def latency(node: NodeSeen) -> Iterator[Finding]:
    """Slow answers hold up every token."""
    trips_s = node.round_trips_s
    slow = [f"no. {i + 1} took {s * 1000:.0f} ms" for i, s in enumerate(trips_s) if s >= _SLOW_S]
    median_s = statistics.median(trips_s) if trips_s else 0.0
    if median_s < _SLOW_MEDIAN_S and len(slow) < _NUM_SLOW:
        return
    yield warning(
        "latency",
        f"of {len(trips_s)} round trips half took {median_s * 1000:.1f} ms or more"
        + (f"; {', '.join(slow[:4])}{' …' if len(slow) > 4 else ''}" if slow else ""),
        "bring workers and server nearer to each other; SLOWLOG GET names commands that hold the server up",
    )


def clock(node: NodeSeen) -> Iterator[Finding]:
    """Deadlines and ages are on the server's clock, those who look at them on another."""
    ahead_s = node.clock_ahead_s
    if abs(ahead_s) > _CLOCK_S + node.clock_error_s:
        yield warning(
            "clock",
            f"the server's clock is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's",
            "let both be set by NTP: time limits and ages of jobs are on the server's clock",
        )


NODE_CHECKS: Final[tuple[Callable[[NodeSeen], Iterator[Finding]], ...]] = (
    unreachable,
    version,
    replica,
    policy,
    memory,
    persistence,
    connections,
    latency,
    clock,
)
