"""One reader for many requests: one XREAD over all of their streams that have not ended.

After each reply it pauses, so that what comes meanwhile is read together: without that, a reader of a thousand streams
would be woken by the first entry of every step, and again for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from headrace.clients import replies
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
        # By stream, all three in one order: its reader, and its words in the command: its name, the id to read after.
        self._readers: dict[bytes, Reader] = {}
        self._names: dict[bytes, bytes] = {}
        self._after: dict[bytes, bytes] = {}

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._readers)

    def follow(self, request_ids: Iterable[str]) -> None:
        """Read these too, from their beginning."""
        for request_id in request_ids:
            stream = self._keys.out(request_id).encode()
            self._readers[stream] = reader = Reader(request_id)
            self._names[stream] = _word(stream)
            self._after[stream] = _word(reader.read_from.encode())

    def read(self) -> list[tuple[str, Event]]:
        """Wait for entries, for a second at most; give what they tell, per request in order.

        Raises a StreamError of `headrace.clients` for entries that do not follow from those before.
        """
        self._connection.send_packed_command([self._command()])
        events: list[tuple[str, Event]] = []
        for stream, found in self._connection.read_response() or ():
            reader = self._readers[stream]
            request_id = reader.request_id
            for entry_id, fields in replies.entries(found):
                event = reader.feed(entry_id, fields)
                if event is not None:
                    events.append((request_id, event))
            if reader.done:
                del self._readers[stream], self._names[stream], self._after[stream]
            else:
                self._after[stream] = _word(found[-1][0])
        if self._readers:
            time.sleep(self._pause_s)
        return events

    def _command(self) -> bytes:
        """The next XREAD. Of thousands of words only those of streams that went on are packed anew."""
        head = b"*%d\r\n" % (4 + 2 * len(self._readers)) + _HEAD
        return b"".join([head, *self._names.values(), *self._after.values()])

    def close(self) -> None:
        """Release the connection."""
        self._connection.disconnect()
        self._client.close()


def _word(word: bytes) -> bytes:
    """A word of a command as it is sent."""
    return b"$%d\r\n%b\r\n" % (len(word), word)


_HEAD = b"".join(map(_word, (b"XREAD", b"BLOCK", b"%d" % _BLOCK_MS, b"STREAMS")))
