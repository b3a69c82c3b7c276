"""Read everything there is to see, once, within limits. Nothing is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from ...clients.keys import Keys
from ..cluster import slot_of
from .node import Node, masters, read_node
from .queue import MAX_PENDING, read_queue
from .sample import Sampler
from .seen import KeysSeen, NodeSeen, QueueSeen, Seen


@dataclass(frozen=True, slots=True)
class Limits:
    """What the doctor may take, and what it cannot read from the server."""

    lease_s: float  # where no worker says its own
    queue_ttl_s: float
    max_keys: int  # that the servers walk by, all together
    max_time_s: float  # for these


def look(client: redis.Redis, keys: Keys, limits: Limits, clock: Callable[[], float] = time.time) -> Seen:
    """Look at the server behind `client`, which must be this call's own; `clock` is this machine's, in seconds.

    Raises redis.RedisError if that one server does not answer; whatever else cannot be seen is told in the result.
    """
    found = masters(client)
    nodes = tuple(read_node(node, keys, clock) for node in found)
    there = [node for node, seen in zip(found, nodes, strict=True) if not seen.error]
    refused = [f"what INFO tells of {node.address}" for node in nodes if not node.error and not node.info]
    queue = _queue(there, keys, refused)
    stored = _stored(there, nodes, keys, limits, refused)
    leases = [each.fields.get("lease_s", "") for each in queue.alive] if queue else []
    options: Any = client.connection_pool.connection_kwargs
    return Seen(
        keys=keys,
        lease_s=max(
            (float(lease) for lease in leases if lease.replace(".", "", 1).isdecimal()), default=limits.lease_s
        ),
        queue_ttl_s=limits.queue_ttl_s,
        user=options.get("username") or "default",
        nodes=nodes,
        queue=queue,
        stored=stored,
        refused=tuple(refused),
        left_out=tuple(_left_out(queue, stored)),
    )


def _left_out(queue: QueueSeen | None, stored: KeysSeen) -> Iterator[str]:
    for line in queue.lines if queue else ():
        if len(line.pending) >= MAX_PENDING:
            yield (
                f"taken jobs of priority {line.status.priority} but the oldest {MAX_PENDING:,} of {line.status.taken:,}"
            )
    if not stored.is_complete:
        yield f"all keys but {stored.num_looked:,} of {stored.num_all:,}; --max-keys and --max-time allow more"


def _queue(nodes: Sequence[Node], keys: Keys, refused: list[str]) -> QueueSeen | None:
    owner = next((node for node in nodes if node.owns(slot_of(keys.jobs()))), None)
    if owner is None:
        refused.append("the queue: its node does not answer")
        return None
    try:
        return read_queue(owner, keys)
    except redis.RedisError as error:
        refused.append(f"the queue: {error}")
        return None


def _stored(
    there: Sequence[Node], nodes: Sequence[NodeSeen], keys: Keys, limits: Limits, refused: list[str]
) -> KeysSeen:
    sampler = Sampler(keys, limits.max_keys, limits.max_time_s)
    num_all = sum(node.num_keys for node in nodes)
    try:
        stored = sampler.look(there, num_all) if there else KeysSeen()
    except redis.RedisError as error:
        refused.append(f"the keys: {error}")
        return KeysSeen()
    refused += [f"what {command} tells: {error}" for command, error in sampler.refused.items()]
    return stored
