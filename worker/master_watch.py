"""Sees a failover that no connection notices: the old master may live, and takes writes until sentinels reach it.

That lasts some ten seconds. What was written there is written again to the new master, but the sooner the better.
"""

from __future__ import annotations

import threading
from random import SystemRandom
from typing import Any, Final, cast

from redis import exceptions

from ..clients.address import Address
from ..clients.connect import make_finder
from .connection import Link

_EVERY_S: Final = 1.0
_RANDOM: Final = SystemRandom()


class MasterWatch:
    """A thread that asks the sentinels for the master, and has links that are connected to another server leave it."""

    def __init__(self, address: Address, links: tuple[Link, ...]) -> None:
        self._finder = make_finder(address, address.options)
        self._service = address.service
        self._links = links
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-master-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()
        for sentinel in self._finder.sentinels:
            cast("Any", sentinel).close()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S * _RANDOM.uniform(0.5, 1.0)):  # not all workers at once
            try:
                master = self._finder.discover_master(self._service)
            except (exceptions.RedisError, OSError):
                continue  # between two masters, or no sentinel answers: the links find out by themselves
            for link in self._links:
                if link.is_connected and link.node != master:
                    link.leave()
