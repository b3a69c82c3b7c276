"""The parts of a worker that act on a stage: its connections, its waiting, its pool and its renewals."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from headrace.clients.address import Address
from headrace.worker.connection import Link
from headrace.worker.control import Control
from headrace.worker.errors import LinkError
from headrace.worker.inbox import Inbox
from headrace.worker.lease import LeaseThread
from headrace.worker.lua import Args
from headrace.worker.prepare import Prepared, PreparePool
from tests.support.chaos_stage import Actor, Killed, Stage


class StagedLink(Link):
    """A worker's connection: every sending is a point, and replies can be lost, at one command or from it on."""

    stage: Stage

    def __init__(self, address: Address, socket_timeout_s: float, name: str) -> None:
        super().__init__(address, socket_timeout_s, name)
        self.stage.links.append(self)
        self._left: int | None = None  # replies that still come before the connection is lost
        self._is_cut = False
        self._unread = 0  # replies of the server that nobody is to see
        self._asked: deque[Args] = deque()  # whose replies are to be read

    def send(self, *commands: Args) -> None:
        """Send; some of it, or the reply to some of it, may be lost."""
        self.stage.point()
        if self._is_cut:
            self._lose()
        self._asked.extend(commands)
        loss = self.stage.losses(len(commands))
        if loss is None:
            super().send(*commands)
        else:
            self._left, before = loss
            sent = commands[: self._left] if before else commands
            self._unread = len(sent) - self._left
            if sent:
                super().send(*sent)
        if self.stage.current is not None and self.stage.current.killed:
            raise Killed

    def read(self) -> Any:
        """Read a reply, or lose the connection."""
        if self._is_cut:
            self._lose()
        if self._left != 0:
            self._left = None if self._left is None else self._left - 1
            reply, asked = super().read(), self._asked.popleft()
            return self.stage.server_time(reply) if asked[0] == b"TIME" else reply
        with contextlib.suppress(LinkError):
            for _ in range(self._unread):  # the server has done it all
                super().read()
        self._back_off("lost on the stage")
        raise LinkError("lost on the stage")

    def cut(self) -> None:
        """Lose the connection: what is under way has no reply, and nothing goes out on it any more."""
        self._is_cut = self.is_connected

    def _lose(self) -> None:
        self._back_off("cut on the stage")
        raise LinkError("cut on the stage")

    def close(self) -> None:
        """Close."""
        self._is_cut = False
        self._left, self._unread = None, 0
        self._asked.clear()
        super().close()

    def _back_off(self, reason: str) -> None:
        super()._back_off(reason)
        self._pause_s = self._next_try_s = 0.0


class StagedControl(Control):
    """Waiting is letting others run."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def wait(self, timeout_s: float, *filenos: int) -> list[int]:
        """Wait for a reply only, which is on its way, and for nothing else."""
        del timeout_s
        self._stage.point()
        return super().wait(0.5 if filenos else 0.0, *filenos)


class StagedInbox(Inbox):
    """Its blocking read does not block."""

    def blocking_take(self, count: int, block_s: float) -> Args:
        """As the original, without BLOCK."""
        command = super().blocking_take(count, block_s)
        at = command.index(b"BLOCK")
        return (*command[:at], *command[at + 2 :])


class StagedPool:
    """Prepares at once; the results come out when chance will have it."""

    stage: Stage

    def __init__(self, *_options: object) -> None:
        self._done: list[Prepared[Any]] = []

    def submit(self, ticket: object, work: Callable[[], Any]) -> None:
        """Do the work."""
        try:
            self._done.append(Prepared(ticket, work()))
        except Exception as error:  # noqa: BLE001  as the original
            self._done.append(Prepared[Any](ticket, error=error))

    def done(self) -> list[Prepared[Any]]:
        """Some results."""
        count = self.stage.chance.randint(0, len(self._done))
        out, self._done = self._done[:count], self._done[count:]
        return out

    def close(self) -> None:
        """Nothing to end."""


class StagedLeases(LeaseThread):
    """Renews when the stage lets it, as an actor of its own."""

    stage: Stage

    def start(self) -> None:
        """Become an actor."""
        self.actor = Actor(self.stage, "renewals", self._renew)
        self.stage.actors.append(self.actor)
        self.stage.renewals.append(self)

    def _renew(self) -> None:
        while True:
            self.stage.point()
            self._round(self.stage.monotonic())

    def stop(self) -> None:
        """End."""
        if hasattr(self, "actor"):
            current, self.stage.current = self.stage.current, None
            self.actor.end()
            self.stage.current = current
        self._link.close()


@contextlib.contextmanager
def staged(stage: Stage) -> Iterator[None]:
    """Have every worker made from here on act on this stage."""
    parts: dict[object, type] = {
        Link: StagedLink,
        Inbox: StagedInbox,
        PreparePool: StagedPool,
        LeaseThread: StagedLeases,
    }
    clock = ModuleType("time")
    clock.__dict__.update(time.__dict__, monotonic=stage.monotonic)
    with pytest.MonkeyPatch.context() as patch:
        for part in (StagedLink, StagedPool, StagedLeases):
            patch.setattr(part, "stage", stage, raising=False)
        for name, module in list(sys.modules.items()):
            if not name.startswith("headrace.worker."):
                continue
            for attribute, value in list(vars(module).items()):
                if value is time:
                    patch.setattr(module, attribute, clock)
                elif isinstance(value, type) and value in parts:
                    patch.setattr(module, attribute, parts[value])
        yield
