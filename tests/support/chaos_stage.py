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
import threading
import time
from collections.abc import Callable
from typing import Any

import redis

from headrace.clients.keys import GROUP


class Killed(BaseException):
    """Ends an actor wherever it stands: no error, but what takes the place of SIGKILL."""


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
        self.links: list[Any] = []  # every connection made on this stage
        self.renewals: list[Any] = []  # and every renewal thread
        self._lose = lose
        self._most_losses = most_losses
        self.ahead_s = 0.0

    # --- time ---------------------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        """The clock of everybody on the stage."""
        return time.monotonic() + self.ahead_s

    def server_time(self, reply: Any) -> Any:
        """What the server would say to TIME if time had passed for it, too."""
        if not isinstance(reply, list | tuple):
            return reply
        micros = int(reply[0]) * 10**6 + int(reply[1]) + int(self.ahead_s * 1e6)
        return [str(part).encode() for part in divmod(micros, 10**6)]

    def advance(self, seconds: float, streams: tuple[str, ...]) -> None:
        """Let time pass, on the stage and for every pending entry on the server."""
        self.ahead_s += seconds
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
