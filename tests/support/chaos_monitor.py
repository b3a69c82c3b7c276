"""What a server is told, as MONITOR shows it: which connection appended what to which stream."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import redis

from headrace.worker import lua
from tests.support.server import Server


@dataclass(frozen=True)
class Told:
    """One command: who sent it (address of the connection; "lua" for what a script did), and its words."""

    client: str
    words: tuple[str, ...]


class Monitor:
    """Collects every command from now on until `close`."""

    def __init__(self, server: Server) -> None:
        self._client = server.client()
        self._monitor = self._client.monitor()
        self._monitor.__enter__()
        self._lock = threading.Lock()
        self._told: list[Told] = []
        self._ended = False
        self._marker = server.client()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            try:
                seen = self._monitor.next_command()
            except (redis.RedisError, OSError, ValueError):
                return
            words = tuple(seen["command"].split(" "))  # right for the first ones; nobody looks at payloads here
            client = "lua" if seen["client_type"] == "lua" else f"{seen['client_address']}:{seen['client_port']}"
            with self._lock:
                self._told.append(Told(client, words))

    def so_far(self) -> list[Told]:
        """Every command up to now."""
        marker = f"marker-{time.monotonic_ns()}"
        self._marker.echo(marker)
        while True:
            with self._lock:
                told = list(self._told)
            if any(marker in each.words for each in told):
                return told
            time.sleep(0.002)

    def appends(self, out: str) -> list[tuple[str, bool]]:
        """Of each attempt to append to a stream: (the connection that made it, whether the server took it)."""
        found: list[tuple[str, bool]] = []
        for each in self.so_far():
            if each.client != "lua" and each.words[:2] == ("EVALSHA", lua.APPEND.sha) and out in each.words:
                found.append((each.client, False))
            elif each.client == "lua" and each.words[0].upper() == "XADD" and each.words[1] == out:
                found[-1] = (found[-1][0], True)
        return found

    def connections_of(self, worker: str) -> set[str]:
        """The addresses that a worker's connections have now."""
        return {each["addr"] for each in self._marker.client_list() if each["name"].startswith(worker)}

    def close(self) -> None:
        """End."""
        self._ended = True
        self._marker.echo("end")
        self._thread.join(5)
        self._marker.close()
        self._client.close()
