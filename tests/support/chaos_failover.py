"""A failover as a client meets it: everything that was written since some moment is gone, all connections are cut."""

from __future__ import annotations

import redis


class Replica:
    """What lay under a prefix when it was made, consumer groups and all: a replica that lags behind."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self._client = client
        self._pattern = f"{prefix}:*"
        keys = list(client.scan_iter(match=self._pattern, count=1000))
        self._dumps = {key: (client.dump(key), max(client.pttl(key), 0)) for key in keys}

    def take_over(self) -> None:
        """Put everything back as it was."""
        for key in self._client.scan_iter(match=self._pattern, count=1000):
            if key not in self._dumps:
                self._client.delete(key)
        for key, (dump, ttl_ms) in self._dumps.items():
            if dump is not None:
                self._client.restore(key, ttl_ms, dump, replace=True)
