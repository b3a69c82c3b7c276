"""A server and queue for the doctor: healthy until a test plants a fault. Fixture `patient`, on Valkey and on Redis."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.command import Outcome
from tests.support.rig import Rig
from tests.support.server import Server, redis_binary, start_server

HEALTHY = ("--maxmemory", "256mb", "--enable-protected-configs", "yes")


@dataclass
class Diagnosis:
    """What `headrace doctor --json` said."""

    code: int
    document: dict[str, Any]

    @property
    def checks(self) -> set[str]:
        """Which checks found something."""
        return {each["check"] for each in self.document["findings"]}

    def about(self, check: str) -> dict[str, str]:
        """The one finding of a check."""
        [found] = [each for each in self.document["findings"] if each["check"] == check]
        return found


class Patient(Rig):
    """A queue of its own on a healthy server. Invariants are not checked: they are what is broken here."""

    call: Callable[..., Outcome]

    @property
    def place(self) -> list[str]:
        """Flags that name it."""
        return ["--redis-url", self.server.url, "--prefix", self.prefix, "--queue", self.keys.queue]

    def examine(self, *flags: str) -> Diagnosis:
        """Run the doctor. Later flags win."""
        outcome = self.call("doctor", "--json", *self.place, *flags)
        assert not outcome.err
        return Diagnosis(outcome.code, json.loads(outcome.out))

    @contextmanager
    def configured(self, name: str, value: object) -> Iterator[None]:
        """A setting of the server, until the block ends."""
        before = self.client.config_get(name)[name]
        self.client.config_set(name, value)
        try:
            yield
        finally:
            self.client.config_set(name, before)

    def add_aged(self, request_id: str, age_s: float) -> str:
        """Add a job that was added so long ago."""
        at_ms = int((time.time() - age_s) * 1000)
        return self.add(request_id, {"prompt": "Hello", "max_tokens": 3}, entry_id=f"{at_ms}-0")


@pytest.fixture(scope="module", params=["valkey", "redis"])
def healthy_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Valkey, and Redis where one is installed, with all that the doctor asks for."""
    binary = redis_binary() if request.param == "redis" else None
    if request.param == "redis" and binary is None:
        pytest.skip("no Redis on this machine")
    started = start_server(tmp_path_factory.mktemp("healthy"), *HEALTHY, binary=binary, appendonly=True)
    yield started
    started.stop()


@pytest.fixture
def patient(healthy_server: Server, prefix: str, call: Callable[..., Outcome]) -> Iterator[Patient]:
    """A queue that nobody has used yet."""
    made = Patient(healthy_server, prefix, healthy_server.client(), check_at_end=False)
    made.call = call
    yield made
    made.close()
