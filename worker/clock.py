"""The server's clock, as far as this process can tell it without asking each time."""

from __future__ import annotations

import time
from typing import cast

_FRESH_S = 1.0


def server_s(reply: list[bytes]) -> float:
    """What a reply to TIME (seconds, microseconds) says, in seconds since the epoch."""
    seconds, micros = reply
    return int(seconds) + int(micros) / 1e6


class ServerClock:
    """Counts on from the server's last answer to TIME with this machine's monotonic clock.

    Never behind the server's own clock, ahead of it by at most the time that the last answer took.
    """

    def __init__(self) -> None:
        self._offset_ms = 0.0  # server's clock less the monotonic one
        self._read_s: float | None = None  # monotonic time of the command that told it last

    def set(self, reply: object, sent_s: float) -> None:
        """Take the reply to TIME (seconds, microseconds) to a command sent at monotonic `sent_s`."""
        if isinstance(reply, list):
            self._offset_ms = (server_s(cast("list[bytes]", reply)) - sent_s) * 1000
            self._read_s = sent_s

    def is_fresh(self, now_s: float) -> bool:
        """Whether the server has told it so lately that nobody can have set it since, short of doing so just now."""
        return self._read_s is not None and now_s - self._read_s < _FRESH_S

    def at_ms(self, monotonic_s: float) -> float:
        """What the server's clock showed then, in ms since the epoch."""
        return monotonic_s * 1000 + self._offset_ms

    def now_ms(self) -> int:
        """Milliseconds since the epoch on the server's clock."""
        return int(self.at_ms(time.monotonic()))
