"""One reader for many requests: one XREAD over all of their streams that have not ended.

After each reply it pauses, so that what comes meanwhile is read together: without that, a reader of a thousand streams
would be woken by the first entry of every step, and again for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from headrace.clients.events import Event
from headrace.clients.keys import Keys
from headrace.clients.reader import Reader

from .rig import connect

PAUSE_S = 0.01
_BLOCK_MS = 1000


class Multiplexer:
    """Follows requests; `read` gives their events until `open` is 0."""

    def __init__(self, url: str, keys: Keys, pause_s: float = PAUSE_S) -> None:
        self._client = connect(url)
        self._connection = self._client.connection_pool.get_connection()
        self._keys = keys
        self._pause_s = pause_s
        self._readers: dict[bytes, Reader] = {}

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._readers)

    def follow(self, request_ids: Iterable[str]) -> None:
        """Read these too, from their beginning."""
        for request_id in request_ids:
            self._readers[self._keys.out(request_id).encode()] = Reader(request_id)

    def read(self) -> list[tuple[str, Event]]:
        """Wait for entries, for a second at most; give what they tell, per request in order.

        Raises a StreamError of `headrace.clients` for entries that do not follow from those before.
        """
        readers = self._readers
        after = [reader.read_from for reader in readers.values()]
        self._connection.send_command("XREAD", "BLOCK", _BLOCK_MS, "STREAMS", *readers, *after)
        found: list[tuple[bytes, list[Any]]] = self._connection.read_response() or []
        events: list[tuple[str, Event]] = []
        for stream, entries in found:
            reader = readers[stream]
            for entry_id, flat in entries:
                event = reader.feed(entry_id, dict(zip(flat[::2], flat[1::2], strict=True)))
                if event is not None:
                    events.append((reader.request_id, event))
            if reader.done:
                del readers[stream]
        if self._readers:
            time.sleep(self._pause_s)
        return events

    def close(self) -> None:
        """Release the connection."""
        self._connection.disconnect()
        self._client.close()
