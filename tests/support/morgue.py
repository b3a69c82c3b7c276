"""A dead-letter stream filled by hand: fixtures `morgue`, on the shared server, and `own_morgue`, on one of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.clients.keys import Keys, Priority
from tests.support.server import Server

PROMPT = "a prompt that nobody is to see"
PAYLOAD = json.dumps({"prompt": PROMPT, "max_tokens": 5}).encode()


class Morgue:
    """The dead-letter stream of a queue, filled by hand as a worker fills it."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.client = server.client()
        self.keys = keys
        self.place = ["--redis-url", server.url, "--queue", keys.queue, "--prefix", keys.prefix]

    def add(self, *pairs: Any, priority: Priority = "normal", entry_id: str = "*", reason: str = "why") -> str:
        """Add an entry of the job's fields `pairs`; its id."""
        told = ("reason", reason, "error", "words", "attempts", 4, "worker", "w")
        source = ("from", f"{self.keys.jobs(priority)} 5-0")
        return self.client.execute_command("XADD", self.keys.dead, entry_id, *pairs, *told, *source).decode()

    def add_good(self, name: str = "old", **options: Any) -> str:
        return self.add("id", name, "json", PAYLOAD, **options)

    def ids(self) -> list[str]:
        return [entry_id.decode() for entry_id, _ in self.client.xrange(self.keys.dead)]

    def jobs(self, priority: Priority = "normal") -> list[dict[bytes, bytes]]:
        return [fields for _, fields in self.client.xrange(self.keys.jobs(priority))]


@pytest.fixture
def morgue(server: Server, keys: Keys) -> Morgue:
    """On the shared server."""
    return Morgue(server, keys)


@pytest.fixture
def own_morgue(own_server: Callable[..., Server], keys: Keys) -> Morgue:
    """On a server that may be configured."""
    return Morgue(own_server(), keys)
