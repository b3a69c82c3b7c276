"""How a worker is set up: one frozen value, made by the command line, an embedding program or a test."""

from __future__ import annotations

from dataclasses import dataclass

from ..clients.address import parse_address

HOUR_S = 3600.0
LONGEST_FLUSH_INTERVAL_S = 10.0  # readers give up on a stream that is silent for too long


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of one worker. Lease, result and queue lifetimes are one value per queue: give every worker the same.

    Raises ValueError where a combination could not take effect.
    """

    url: str = "redis://127.0.0.1:6379/0"
    prefix: str = "headrace"
    queue: str = "default"
    lease_s: float = 30.0  # an entry that was not renewed for this long is another worker's to take
    watchdog_s: float = 60.0  # without progress of the step loop for this long, leases are no longer renewed
    drain_timeout_s: float = 30.0  # after SIGTERM: finish what runs for this long, then hand it back
    max_attempts: int = 3  # charged attempts after which a job is given up
    queue_ttl_s: float = 86400.0  # life of a request's stream while it is not ended
    result_ttl_s: float = 600.0  # and afterwards
    max_payload_bytes: int = 8 * 1024 * 1024
    take_limit: int = 16  # most jobs taken at once
    block_s: float = 1.0  # an idle worker waits this long for a job before it looks for abandoned ones
    cancel_poll_s: float = 0.25  # how long a request may go without learning whether it is cancelled
    foreign_model_grace_s: float = 300.0  # how long a job begun with another model waits for a worker that has it
    prepare_timeout_s: float = 30.0  # for rendering and tokenising one prompt
    num_prepare_threads: int = 2
    socket_timeout_s: float = 5.0
    janitor_every_s: float = 300.0  # how often it looks for names that crashed workers have left in the groups
    flush_interval_s: float = 0.0  # tokens of a request are written at most so often; 0: with every step
    burst: bool = False  # end when the queue is empty and nothing runs

    def __post_init__(self) -> None:
        """Refuse what could not take effect."""
        parse_address(self.url)
        positive = ("lease_s", "watchdog_s", "result_ttl_s", "block_s", "cancel_poll_s", "socket_timeout_s")
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")
        if self.drain_timeout_s < 0:
            raise ValueError("drain_timeout_s must not be below 0")
        if not 0 <= self.flush_interval_s <= LONGEST_FLUSH_INTERVAL_S:
            raise ValueError(f"flush_interval_s must be from 0 to {LONGEST_FLUSH_INTERVAL_S:g}")
        if self.max_attempts < 1 or self.take_limit < 1 or self.num_prepare_threads < 1:
            raise ValueError("max_attempts, take_limit and num_prepare_threads must be at least 1")
        if self.queue_ttl_s <= HOUR_S:
            raise ValueError("queue_ttl_s must be above one hour: jobs are ended an hour before their streams expire")
        if self.block_s > 1:
            raise ValueError("block_s must not be above 1")

    @property
    def renew_every_s(self) -> float:
        """Time between two renewals."""
        return self.lease_s / 3

    @property
    def missed_after_s(self) -> float:
        """A renewal is due after a third of the lease; if none has come after half of it, it was missed."""
        return self.lease_s / 2

    @property
    def too_old_after_ms(self) -> int:
        """Age of a job entry from which it is no longer begun."""
        return int((self.queue_ttl_s - HOUR_S) * 1000)
