"""A stage on which whole workers run in one process, command by command, in an order drawn from a seed.

Every worker is the real `Service` on a real server: step loop, renewals, inbox, outbox. Only what would make the order
depend on the machine is taken out of its hands: its threads run when the stage lets them (at every command that they
send, and whenever they would wait), its clock goes on when the stage says so, its pool prepares at once. So a schedule
of hundreds of commands takes milliseconds, a seed says what happens, and between any two commands anything can:
another worker's turn, a lost reply, a freeze longer than the lease, a kill.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import redis

from headrace.clients.keys import GROUP
from headrace.worker.connection import Link
from headrace.worker.control import Control
from headrace.worker.errors import LinkError
from headrace.worker.inbox import Inbox
from headrace.worker.lease import LeaseThread
from headrace.worker.lua import Args
from headrace.worker.prepare import Prepared, PreparePool


class Killed(BaseException):  # noqa: N818  it is no error: it takes the place of SIGKILL
    """Ends an actor wherever it stands."""


class Actor:
    """A thread that runs only while the stage lets it, from one `pause` to the next."""

    def __init__(self, stage: Stage, name: str, run: Callable[[], None]) -> None:
        self.name = name
        self._stage = stage
        self._run = run
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.killed = False
        self.over = False
        self.error: BaseException | None = None
        self.asleep_until = 0  # turn of the stage before which it does not go on
        self._thread = threading.Thread(target=self._body, name=name, daemon=True)
        self._thread.start()

    def _body(self) -> None:
        self._go.acquire()
        try:
            if not self.killed:
                self._run()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  told by `resume`
            self.error = error
        self.over = True
        self._back.release()

    def resume(self) -> None:
        """Let it run to its next pause. Raises what it raised."""
        self._stage.current = self
        self._go.release()
        self._back.acquire()
        self._stage.current = None
        if self.over:
            self._thread.join()
        if self.error is not None:
            raise AssertionError(f"{self.name} failed") from self.error

    def pause(self) -> None:
        """Let others run."""
        self._back.release()
        self._go.acquire()
        if self.killed:
            raise Killed

    def end(self) -> None:
        """Kill it where it stands."""
        self.killed = True
        if not self.over:
            self.resume()


class Stage:
    """Clock, chance, faults, and who may run next."""

    def __init__(self, client: redis.Redis, chance: random.Random, *, lose: float = 0.0, most_losses: int = 8) -> None:
        self.client = client
        self.chance = chance
        self.current: Actor | None = None
        self.actors: list[Actor] = []
        self.turn = 0
        self.num_commands = 0  # sent so far by all links
        self.num_losses = 0
        self.loss_at: tuple[int, bool] | None = None  # (which command, whether it is lost before the server sees it)
        self.kill_at: int | None = None  # which command is its sender's last
        self.links: list[StagedLink] = []  # every one made on this stage
        self.renewals: list[StagedLeases] = []
        self._lose = lose
        self._most_losses = most_losses
        self._ahead_s = 0.0

    # --- time ---------------------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        """The clock of everybody on the stage."""
        return time.monotonic() + self._ahead_s

    def advance(self, seconds: float, streams: tuple[str, ...]) -> None:
        """Let time pass, on the stage and for every pending entry on the server."""
        self._ahead_s += seconds
        for stream in streams:
            with contextlib.suppress(redis.ResponseError):  # no such group
                for row in self.client.xpending_range(stream, GROUP, "-", "+", 100):
                    idle_ms = int(row["time_since_delivered"] + seconds * 1000)
                    owner, entry_id = row["consumer"], row["message_id"]
                    self.client.xclaim(stream, GROUP, owner, 0, [entry_id], idle=idle_ms, justid=True)

    # --- who runs -----------------------------------------------------------------------------------------------------

    def point(self) -> None:
        """Here the running actor lets others run."""
        if self.current is not None:
            self.current.pause()

    def step(self) -> bool:
        """Let somebody run who may. False: nobody may."""
        self.turn += 1
        self.actors = [actor for actor in self.actors if not actor.over]
        ready = [actor for actor in self.actors if actor.asleep_until <= self.turn]
        if ready:
            self.chance.choice(ready).resume()
        return bool(ready)

    # --- what is lost -------------------------------------------------------------------------------------------------

    def losses(self, num_commands: int) -> tuple[int, bool] | None:
        """Of so many commands about to be sent: (the first that is lost, whether before the server sees it)."""
        first, self.num_commands = self.num_commands, self.num_commands + num_commands
        if self.loss_at is not None and first <= self.loss_at[0] < self.num_commands:
            self.num_losses += 1
            return self.loss_at[0] - first, self.loss_at[1]
        if self.kill_at is not None and first <= self.kill_at < self.num_commands and self.current is not None:
            self.current.killed = True  # what is sent is sent; the reply finds nobody
        for index in range(num_commands if self._lose and self.num_losses < self._most_losses else 0):
            if self.chance.random() < self._lose:
                self.num_losses += 1
                return index, self.chance.random() < 0.3
        return None


class StagedLink(Link):
    """A worker's connection: every sending is a point, and replies can be lost, at one command or from it on."""

    stage: Stage

    def __init__(self, url: str, socket_timeout_s: float, name: str) -> None:
        super().__init__(url, socket_timeout_s, name)
        self.stage.links.append(self)
        self._left: int | None = None  # replies that still come before the connection is lost
        self._unread = 0  # replies of the server that nobody is to see

    def send(self, *commands: Args) -> None:
        """Send; some of it, or the reply to some of it, may be lost."""
        self.stage.point()
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
        if self._left is None:
            return super().read()
        if self._left:
            self._left -= 1
            return super().read()
        with contextlib.suppress(LinkError):
            for _ in range(self._unread):  # the server has done it all
                super().read()
        self._back_off("lost on the stage")
        raise LinkError("lost on the stage")

    def close(self) -> None:
        """Close."""
        self._left, self._unread = None, 0
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
        """Wait for a reply only, which is on its way; for nothing else."""
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

    def __init__(self, num_threads: int, timeout_s: float, wake: Callable[[], None]) -> None:
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
