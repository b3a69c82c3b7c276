"""How signals and other threads reach the step loop while it waits."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import threading
from collections.abc import Generator
from types import FrameType


class Control:
    """Asks a running worker to stop, and wakes it. Safe to use from signal handlers and other threads."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.num_stops = 0  # 1: finish what runs, then end; 2 and more: hand everything back now

    def request_stop(self) -> None:
        """Ask the worker to drain; a second time, to hand back at once."""
        self.num_stops += 1
        self.wake()

    def wake(self) -> None:
        """End the loop's present wait."""
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it has ended
            self._writer.send(b"\0")

    def wait(self, timeout_s: float, *filenos: int) -> list[int]:
        """Wait until woken, or one of the sockets can be read, or the time is over. Returns those that can be read."""
        own = self._reader.fileno()
        ready, _, _ = select.select([own, *filenos], [], [], timeout_s)
        if own in ready:
            with contextlib.suppress(BlockingIOError):
                while self._reader.recv(4096):
                    pass
        return [each for each in ready if each != own]

    def close(self) -> None:
        """Release the sockets."""
        self._reader.close()
        self._writer.close()

    @contextlib.contextmanager
    def handling_signals(self) -> Generator[None]:
        """Let SIGTERM and SIGINT ask for a stop, where this is the main thread; elsewhere signals are not ours."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(_number: int, _frame: FrameType | None) -> None:
            self.request_stop()

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
