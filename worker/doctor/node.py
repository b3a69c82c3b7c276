"""One server node on a connection of its own, asked in pipelines, and what it says of itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast
from uuid import uuid4

import redis
from redis.exceptions import NoPermissionError

from ...clients.keys import Keys
from ..clock import server_s
from ..lua import Args
from ..rights import Right, Role, rights_of
from ..server_check import info_pairs
from .seen import NodeSeen

NUM_ROUND_TRIPS: Final = 20


class Node:
    """Asks one server. Replies are as the server gives them, whatever the client would make of them."""

    def __init__(self, client: redis.Redis, address: str, slots: Sequence[range] = (range(16384),)) -> None:
        self.client = client
        self.address = address
        self._slots = slots
        cast(Any, client).response_callbacks.clear()

    def owns(self, slot: int) -> bool:
        """Whether a slot's keys lie here: always, if the server is no cluster's."""
        return any(slot in part for part in self._slots)

    def ask(self, *commands: Args) -> list[Any]:
        """Send all, then read all; one outcome each, a redis.ResponseError where the server refuses a command.

        Raises redis.RedisError if the server does not answer.
        """
        pipeline: Any = cast(Any, self.client).pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return pipeline.execute(raise_on_error=False)


def masters(client: redis.Redis) -> list[Node]:
    """The server behind `client`, or, if it is a cluster's, every master of that. Raises redis.RedisError."""
    pool: Any = client.connection_pool
    options: dict[str, Any] = pool.connection_kwargs
    here = Node(client, str(options.get("path", "")))
    [reply] = here.ask(("CLUSTER", "SLOTS"))
    if isinstance(reply, redis.ResponseError):  # no cluster
        # behind sentinels it is the connection that has found out where the master is
        host, port = getattr(pool, "master_address", None) or (options.get("host", "?"), options.get("port", "?"))
        here.address = here.address or f"{host}:{port}"
        return [here]
    if not reply:
        raise redis.ConnectionError("the Cluster has no slots yet: redis-cli --cluster create gives them to its nodes")
    slots: dict[tuple[str, int], list[range]] = {}
    for first, last, master, *_ in reply:
        address = (master[0].decode() if master[0] else str(options.get("host")), int(master[1]))
        slots.setdefault(address, []).append(range(first, last + 1))
    found: list[Node] = []
    for (host, port), parts in sorted(slots.items()):
        own: Any = type(pool)(connection_class=pool.connection_class, **{**options, "host": host, "port": port})
        found.append(Node(redis.Redis(connection_pool=own), f"{host}:{port}", parts))
    return found


def read_node(node: Node, keys: Keys, clock: Callable[[], float]) -> NodeSeen:
    """What a node says of itself; `clock` is this machine's, in seconds since the epoch."""
    asked = rights_of(keys, uuid4().hex)
    try:
        info, num_keys, *outcomes = node.ask(("INFO",), ("DBSIZE",), *(right.trial for right in asked))
        trips = [_round_trip(node, clock) for _ in range(NUM_ROUND_TRIPS)]
    except (redis.RedisError, OSError) as error:
        return NodeSeen(node.address, error=str(error) or type(error).__name__)
    # The shorter the way, the better is known when the server looked at its clock.
    took_s, ahead_s = min(trips)
    return NodeSeen(
        node.address,
        info=dict(info_pairs(info)) if isinstance(info, bytes) else {},
        round_trips_s=tuple(each for each, _ in trips),
        clock_ahead_s=ahead_s,
        clock_error_s=took_s / 2,
        lacking=_lacking(asked, outcomes),
        num_keys=num_keys if isinstance(num_keys, int) else 0,
    )


def _round_trip(node: Node, clock: Callable[[], float]) -> tuple[float, float]:
    """How long one took, and how far the server's clock is ahead of this machine's, in seconds."""
    begun_s, sent_s = time.perf_counter(), clock()
    [reply] = node.ask(("TIME",))
    took_s = time.perf_counter() - begun_s
    if isinstance(reply, redis.ResponseError):
        return took_s, 0.0
    return took_s, server_s(reply) - (sent_s + took_s / 2)


def _lacking(asked: Sequence[Right], outcomes: Sequence[Any]) -> Mapping[str, tuple[str, ...]]:
    """By role, what the user may not do, as the ACL rules that would allow it."""
    found: dict[Role, list[str]] = {}
    for right, outcome in zip(asked, outcomes, strict=True):
        if isinstance(outcome, NoPermissionError):
            for role in right.roles:
                found.setdefault(role, []).append(right.lacking_by(str(outcome)))
    return {role: tuple(dict.fromkeys(rules)) for role, rules in found.items()}
