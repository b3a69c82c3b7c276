"""A worker by hand: writes a request's stream entry by entry, only ever by the append script."""

from __future__ import annotations

from typing import Any

import redis

from headrace.clients.entries import encode, format_id, parse_id, to_map
from headrace.clients.events import (
    EntryId,
    ErrorInfo,
    Event,
    Finished,
    JobRef,
    ModelRef,
    Reason,
    Released,
    Started,
    Tokens,
    Usage,
)
from headrace.clients.keys import Keys
from headrace.clients.lua import APPEND
from headrace.clients.payload import Kind

FP = "f" * 64
MODEL = ModelRef("scripted", "0" * 64)


class HandWorker:
    """Follows what it wrote itself: the newest id, and how many tokens of choice 0 there are."""

    def __init__(
        self,
        server: redis.Redis | redis.RedisCluster,
        keys: Keys,
        request_id: str,
        kind: Kind = "d",
        fp: str | None = None,
    ):
        self.server = server
        self.keys = keys
        self.id = request_id
        self.kind: Kind = kind
        self.newest = ""
        self.attempt = 0
        self.at: EntryId = (0, 0)
        self.count = 0
        self.flagged = False
        self.fp = fp or self._fp_of_stream()

    def _fp_of_stream(self) -> str:
        from headrace.clients.entries import decode

        first = self.server.xrange(self.keys.out(self.id), count=1)
        if not first:
            return FP
        self.newest = self.server.xrevrange(self.keys.out(self.id), count=1)[0][0].decode()
        return decode(*first[0]).fp

    def append(self, fields: dict[str, Any] | Event, at: EntryId, ttl_ms: int = 60_000, unflag: bool = False) -> bool:
        field, payload = encode(fields if isinstance(fields, dict) else to_map(fields), self.kind)
        keys = (self.keys.out(self.id), self.keys.cancel(self.id))
        args = (self.newest, format_id(at), field, payload, ttl_ms, "1" if unflag else "0")
        ok, detail = self.server.eval(APPEND.source, 2, *keys, *args)
        if ok:
            self.newest, self.at, self.flagged = format_id(at), at, bool(detail)
        return bool(ok)

    def start(self, resumed: tuple[int, ...] | None = None, **changes: Any) -> None:
        """A new attempt, above every earlier one and not below the server's clock."""
        out = self.keys.out(self.id)
        node = (
            {"target_nodes": self.server.get_node_from_key(out)} if isinstance(self.server, redis.RedisCluster) else {}
        )
        seconds, micros = self.server.execute_command("TIME", **node)
        base = parse_id(self.newest)[0] + 1 if self.newest else 0
        self.attempt += 1
        at = (max(base, seconds * 1000 + micros // 1000), 0)
        fields = {
            "attempt": self.attempt,
            "worker": "by-hand",
            "job": JobRef(self.keys.jobs(), "1-1"),
            "resumed": (self.count,) if resumed is None else resumed,
            "seed": 7,
            "fp": self.fp,
            "model": MODEL,
            **changes,
        }
        assert self.append(Started(at, **fields), at)

    def next(self) -> EntryId:
        return self.at[0], self.at[1] + 1

    def tokens(self, text: str, index: int | None = None, **more: Any) -> None:
        """One token per character."""
        ids = tuple(map(ord, text))
        event = Tokens(self.next(), self.count if index is None else index, ids, text, **more)
        assert self.append(event, event.id, 0)
        self.count += len(ids)

    def release(self) -> None:
        assert self.append(Released(self.next()), self.next(), 0)

    def finish(
        self, reason: Reason = "stop", text: str = "", completion: int | None = None, error: ErrorInfo | None = None
    ) -> None:
        ids = tuple(map(ord, text))
        event = Finished(
            self.next(),
            reason,
            done=True,
            error=error,
            usage=Usage(3, self.count + len(ids) if completion is None else completion),
            index=self.count if ids else None,
            token_ids=ids,
            text=text,
        )
        assert self.append(event, event.id, unflag=True)
        self.count += len(ids)
