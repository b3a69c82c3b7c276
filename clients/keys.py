"""Every key of the protocol, and which names and ids may stand in one.

The braces are literal: in Redis Cluster they are hash tags, so that all keys of a queue lie in one slot, and all keys
of a request in another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from .errors import ConfigError

Priority = Literal["high", "normal", "low"]

DEFAULT_PREFIX: Final = "headrace"
DEFAULT_QUEUE: Final = "default"
GROUP: Final = "workers"  # the consumer group of every jobs stream, created at "0"
PRIORITIES: Final[tuple[Priority, ...]] = ("high", "normal", "low")  # the order in which workers take

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


def is_valid_id(request_id: str) -> bool:
    """Whether `request_id` may name a request: 1 to 128 of `A–Z a–z 0–9 _ . : -`."""
    return _ID.fullmatch(request_id) is not None


def check_id(request_id: str) -> str:
    """Give `request_id` back. Raises ConfigError if it may not name a request."""
    if not is_valid_id(request_id):
        raise ConfigError("a request id is 1 to 128 characters of A-Z a-z 0-9 _ . : -", "id")
    return request_id


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one queue. Raises ConfigError where a name is not 1 to 64 of `A–Z a–z 0–9 _ . -`."""

    prefix: str = DEFAULT_PREFIX
    queue: str = DEFAULT_QUEUE

    def __post_init__(self) -> None:
        for param, name in (("prefix", self.prefix), ("queue", self.queue)):
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{param} is 1 to 64 characters of A-Z a-z 0-9 _ . -", param)

    def jobs(self, priority: Priority = "normal") -> str:
        """Stream of waiting and running jobs of one priority."""
        base = f"{self.prefix}:{{{self.queue}}}:jobs"
        return base if priority == "normal" else f"{base}:{priority}"

    @property
    def all_jobs(self) -> tuple[str, str, str]:
        """The three jobs streams, in the order in which workers take: high, normal, low."""
        return self.jobs("high"), self.jobs("normal"), self.jobs("low")

    @property
    def dead(self) -> str:
        """Stream of the jobs given up, kept until a person purges it."""
        return f"{self.prefix}:{{{self.queue}}}:dead"

    def worker(self, worker: str) -> str:
        """Hash of a live worker. Raises ConfigError if `worker` is no valid name: the same characters as an id."""
        if not is_valid_id(worker):
            raise ConfigError("a worker's name is 1 to 128 characters of A-Z a-z 0-9 _ . : -", "worker")
        return f"{self.prefix}:{{{self.queue}}}:worker:{worker}"

    @property
    def worker_pattern(self) -> str:
        """Pattern for SCAN that finds the hashes of the queue's workers; names hold no character special to it."""
        return f"{self.prefix}:{{{self.queue}}}:worker:*"

    def out(self, request_id: str) -> str:
        """Stream with all that a reader of the request needs. Raises ConfigError if the id is not valid."""
        return f"{self.prefix}:req:{{{check_id(request_id)}}}:out"

    def cancel(self, request_id: str) -> str:
        """The request's cancel flag, a string. Raises ConfigError if the id is not valid."""
        return f"{self.prefix}:req:{{{check_id(request_id)}}}:cancel"
