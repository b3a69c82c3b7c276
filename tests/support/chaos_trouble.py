"""Trouble on the network of workers, from a seed: what a proxy does to their connections while a test runs."""

from __future__ import annotations

import random
import threading
from collections import Counter

from headrace.worker import lua
from tests.support.proxy import Proxy

_REPLIES: tuple[tuple[bytes, ...], ...] = (
    *((script.sha.encode(),) for script in lua.ALL),
    *((b"XRANGE",), (b"XPENDING",), (b"XCLAIM",), (b"XREADGROUP",), (b"EXISTS",), (b"TIME",)),
)


class NetworkTrouble:
    """Swallows single replies and commands, cuts, delays and holds connections, now and then until `end`."""

    def __init__(self, proxy: Proxy, chance: random.Random, pause_s: float) -> None:
        self._proxy = proxy
        self._chance = chance
        self._pause_s = pause_s  # between two, on average
        self._ended = threading.Event()
        self.done: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._chance.uniform(0, 2 * self._pause_s)):
            kind = self._chance.choices(("reply", "command", "cut", "delay", "hold"), (8, 3, 1, 2, 1))[0]
            self.done[kind] += 1
            if kind in {"reply", "command"}:
                needles = self._chance.choice(_REPLIES)
                self._proxy.lose_reply(*needles, before=kind == "command", skip=self._chance.randint(0, 3))
            elif kind == "cut":
                self._proxy.cut()
            elif kind == "delay":
                self._proxy.delay_s = self._chance.uniform(0.001, 0.02)
                self._ended.wait(self._chance.uniform(0.05, 0.5))
                self._proxy.delay_s = 0.0
            else:
                self._proxy.hold()
                self._ended.wait(self._chance.uniform(0.02, 0.6))
                self._proxy.release()

    def end(self) -> None:
        """No further trouble."""
        self._ended.set()
        self._thread.join()
        self._proxy.release()
