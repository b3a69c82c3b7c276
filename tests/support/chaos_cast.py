"""Who acts on the stage: workers, and callers of the client library (producers, cancellers, readers)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import redis

from headrace.clients.errors import StreamError
from headrace.clients.events import Event
from headrace.clients.following import Following, Limit
from headrace.clients.keys import Keys
from headrace.clients.reader import Reader
from headrace.clients.steps import Command, LostReplyError, Pause, RunScript
from headrace.engine.engine import Engine
from headrace.engine.types import EngineConfig, ModelInfo
from headrace.worker.options import WorkerSettings
from headrace.worker.service import Service
from tests.support.chaos_links import StagedControl
from tests.support.chaos_model import ChaosRunner
from tests.support.chaos_stage import Actor, Stage
from tests.support.rig import ListLog
from tests.support.scripted import ByteTokenizer

LEASE_S = 10.0
MODEL = ModelInfo("chaos", "c" * 64)


class StagedWorker:
    """A worker: its step loop and its renewals are two actors of the same process."""

    def __init__(self, stage: Stage, url: str, prefix: str, **settings: Any) -> None:
        self._stage = stage
        self.control = StagedControl(stage)
        self.log = ListLog()
        options = {"url": url, "prefix": prefix, "lease_s": LEASE_S, "drain_timeout_s": 1.0, **settings}
        engine = Engine(ChaosRunner(num_blocks=64), EngineConfig(max_num_seqs=4), clock=stage.monotonic)
        self.service = Service(
            engine, ByteTokenizer(), MODEL, WorkerSettings(**options), control=self.control, log=self.log
        )
        num_links = len(stage.links)
        try:
            self.service.start()
        finally:
            self._links = stage.links[num_links:]
        self._renewals = stage.renewals[-1]
        self.exit_code: int | None = None
        self.loop = Actor(stage, "loop", self._run)
        stage.actors.append(self.loop)

    def _run(self) -> None:
        self.exit_code = self.service.run()

    @property
    def actors(self) -> list[Actor]:
        """Both."""
        return [self.loop, self._renewals.actor]

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or was killed."""
        return self.loop.over or self.is_killed

    @property
    def is_killed(self) -> bool:
        """Whether one of its actors was: the whole process is, then."""
        return any(actor.killed for actor in self.actors)

    def kill(self) -> None:
        """As SIGKILL would: wherever it stands, with nothing more sent."""
        for actor in self.actors:
            actor.end()
        self.close()

    def sleep(self, num_turns: int) -> None:
        """Freeze it."""
        for actor in self.actors:
            actor.asleep_until = self._stage.turn + num_turns

    def close(self) -> None:
        """Release its sockets."""
        for link in self._links:
            link.close()
        self.control.close()


class Caller:
    """One call of the client library, carried out a command at a time."""

    def __init__(self, stage: Stage, steps: Generator[Any, Any, Any], client: redis.Redis) -> None:
        self._stage = stage
        self._client = client
        self._steps = steps
        self._step = next(steps)
        self.result: Any = None
        self.over = False

    def advance(self) -> None:
        """Carry out a command; its reply, or the command itself, may be lost."""
        try:
            self._step = self._answer()
        except StopIteration as stop:
            self.result, self.over = stop.value, True

    def _answer(self) -> Any:
        if isinstance(self._step, Pause):
            return self._steps.send(None)
        loss = self._stage.losses(1)
        if loss is not None and loss[1]:
            return self._steps.throw(LostReplyError("lost on the way there"))
        reply = self._carry_out(self._step)
        if loss is not None:
            return self._steps.throw(LostReplyError("lost on the way back"))
        return self._steps.send(reply)

    def _carry_out(self, step: Command | RunScript) -> Any:
        if isinstance(step, RunScript):
            return self._client.eval(step.script.source, len(step.keys), *step.keys, *step.args)
        args = list(step.args)
        if "BLOCK" in args:  # nothing waits on a stage
            at = args.index("BLOCK")
            del args[at : at + 2]
        reply = self._client.execute_command(*args)
        return self._stage.server_time(reply) if args[0] == "TIME" else reply


class Follower:
    """A reader, from its beginning to its end; now and then it is another one, which has the first one's cursor."""

    def __init__(self, stage: Stage, keys: Keys, request_id: str, client: redis.Redis) -> None:
        self._stage = stage
        self._keys = keys
        self._id = request_id
        self._client = client
        self.events: list[Event] = []
        self._following = self._begin("")
        self._call: Caller | None = None
        self.error: StreamError | None = None  # a failover took back what it had read already

    def _begin(self, cursor: str) -> Following:
        return Following(Reader(self._id, cursor), self._keys, Limit(None), raise_on_error=False)

    @property
    def over(self) -> bool:
        """Whether it has the terminal entry, or cannot go on."""
        return self._following.done or self.error is not None

    def interrupted(self) -> None:
        """Its connection is lost."""
        self._following.interrupted()
        self._call = None

    def advance(self) -> None:
        """One command further."""
        try:
            self._advance()
        except StreamError as error:
            self.error = error

    def _advance(self) -> None:
        if self._call is None:
            if self._stage.chance.random() < 0.1:
                self._following = self._begin(self._following.cursor)
            self._call = Caller(self._stage, self._following.fetch(1000), self._client)
        self._call.advance()
        if self._call.over:
            self._following.add(self._call.result)
            self._call = None
            while (event := self._following.take()) is not None:
                self.events.append(event)
