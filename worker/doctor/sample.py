"""A sample of the keys: what kinds there are, what they take, which of them would stay for ever."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import redis

from ...clients.keys import Keys
from ..cluster import slot_of
from ..table import printable
from .node import Node
from .seen import KeysSeen, KindSeen

_PER_SCAN: Final = 500  # keys that the server walks by in one go
_MEASURED: Final = 100  # keys of a kind on a node that are measured
_SHOWN: Final = 3
JOBS, STREAMS, DEAD, WORKERS, FLAGS, OTHERS = "jobs", "request streams", "dead", "workers", "cancel flags", "others"
KINDS: Final = (JOBS, STREAMS, DEAD, WORKERS, FLAGS, OTHERS)
_LASTING: Final = frozenset({JOBS, DEAD})  # may be without a time to live
_BY_TAIL: Final = {"jobs": JOBS, "out": STREAMS, "dead": DEAD, "worker": WORKERS, "cancel": FLAGS}


@dataclass(slots=True)
class _Tally:
    num_keys: int = 0
    num_measured: int = 0
    measured_bytes: int = 0
    num_lasting: int = 0
    lasting: list[str] = field(default_factory=list[str])


class Sampler:
    """Looks at keys under the prefix, node by node, until `max_keys` were walked by or `max_time_s` is over.

    `refused` then holds what the server said to commands that it does not let this user give, by their names.
    """

    def __init__(self, keys: Keys, max_keys: int, max_time_s: float) -> None:
        self.refused: dict[str, str] = {}
        self._keys = keys
        self._max_keys = max_keys
        self._max_time_s = max_time_s
        self._tallies = {kind: _Tally() for kind in KINDS}
        self._most_measured = 0  # of a kind, so far
        self._queues: set[str] = set()
        self._num_looked = 0
        self._is_complete = True
        self._key = re.compile(
            rf"{re.escape(keys.prefix)}:(?:"
            r"\{(?P<queue>[A-Za-z0-9_.\-]+)\}:(?:(?P<jobs>jobs)(?::high|:low)?|(?P<dead>dead)|(?P<worker>worker):.+)"
            r"|req:\{.+\}:(?:(?P<out>out)|(?P<cancel>cancel)))",
            re.DOTALL,
        )

    def look(self, nodes: Sequence[Node], num_all: int) -> KeysSeen:
        """Walk over all nodes, each with its share of the limits. Raises redis.RedisError."""
        for node in nodes:
            self._most_measured += _MEASURED
            self._walk(node, self._max_keys // len(nodes), time.monotonic() + self._max_time_s / len(nodes))
        kinds = tuple(
            KindSeen(kind, t.num_keys, t.num_measured, t.measured_bytes, t.num_lasting, tuple(t.lasting))
            for kind, t in self._tallies.items()
        )
        num_looked = num_all if self._is_complete else min(self._num_looked, num_all)
        return KeysSeen(num_all, num_looked, self._is_complete, kinds, tuple(sorted(self._queues)))

    def _walk(self, node: Node, max_keys: int, ends_s: float) -> None:
        # The queue's own streams are looked at in any case: most of the memory may lie there.
        seen = {name.encode() for name in (*self._keys.all_jobs, self._keys.dead) if node.owns(slot_of(name))}
        self._judge(node, list(seen))
        cursor: Any = 0
        for _ in range(-(-max_keys // _PER_SCAN)):
            [reply] = node.ask(("SCAN", cursor, "MATCH", f"{self._keys.prefix}:*", "COUNT", _PER_SCAN))
            if isinstance(reply, redis.ResponseError):
                raise reply
            cursor, found = reply
            self._num_looked += _PER_SCAN
            # A table that is being resized may give a key twice.
            new = [key for key in dict.fromkeys(found) if key not in seen]
            seen.update(new)
            self._judge(node, new)
            if int(cursor) == 0:
                return
            if time.monotonic() > ends_s:
                break
        self._is_complete = False

    def _judge(self, node: Node, found: list[bytes]) -> None:
        """Ask for what is to be known of these keys, and count them."""
        kinds = [self._kind_of(key) for key in found]
        room = {kind: self._most_measured - tally.num_measured for kind, tally in self._tallies.items()}
        measured: list[bytes] = []
        for key, (kind, _) in zip(found, kinds, strict=True):
            if room[kind] > 0:
                room[kind] -= 1
                measured.append(key)
        commands = [("PTTL", key) for key in found] + [("MEMORY", "USAGE", key) for key in measured]
        outcomes = node.ask(*commands) if commands else []
        for command, outcome in zip(commands, outcomes, strict=True):
            if isinstance(outcome, redis.ResponseError):
                self.refused.setdefault(" ".join(command[:-1]), str(outcome))  # type: ignore[arg-type]
        sizes = dict(zip(measured, outcomes[len(found) :], strict=True))
        for key, (kind, queue), ttl_ms in zip(found, kinds, outcomes[: len(found)], strict=True):
            if ttl_ms != -2:  # else there was no such key, or it has expired meanwhile
                self._count(kind, key, ttl_ms, sizes.get(key))
                if kind is JOBS:
                    self._queues.add(queue)

    def _count(self, kind: str, key: bytes, ttl_ms: Any, num_bytes: Any) -> None:
        tally = self._tallies[kind]
        tally.num_keys += 1
        if isinstance(num_bytes, int):
            tally.num_measured += 1
            tally.measured_bytes += num_bytes
        if ttl_ms == -1 and kind not in _LASTING:
            tally.num_lasting += 1
            if len(tally.lasting) < _SHOWN:
                tally.lasting.append(printable(key.decode("utf-8", "backslashreplace")))

    def _kind_of(self, key: bytes) -> tuple[str, str]:
        """A key's kind, and its queue if it has one."""
        match = self._key.fullmatch(key.decode("utf-8", "replace"))
        if match is None:
            return OTHERS, ""
        tail = next(tail for tail in _BY_TAIL if match[tail])
        return _BY_TAIL[tail], match["queue"] or ""
