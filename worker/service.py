"""Builds a worker out of its parts and runs it to its end."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..clients.address import parse_address
from ..clients.keys import Keys
from ..engine.types import ModelInfo, Tokenizer
from . import lua
from .begin import Beginner
from .clock import ServerClock
from .connection import Failed
from .context import Context
from .control import Control
from .drain import Drain
from .errors import ServerUnavailableError
from .heartbeat import Heartbeat
from .held import Held, Memory, Stage
from .inbox import Inbox
from .janitor import Janitor
from .lease import Leases, LeaseThread
from .links import Links, make_links
from .log import Counters, Log, make_log
from .loop import Loop, Parts
from .options import WorkerSettings
from .outbox import Outbox
from .prepare import PreparePool
from .rights import Alarms
from .running import Running
from .settle import Settler
from .start import Starter
from .waiter import Waiter

if TYPE_CHECKING:
    from ..engine.engine import Engine

EXIT_OK = 0
EXIT_ENGINE_FAILED = 1


def run(
    engine: Engine,
    tokenizer: Tokenizer,
    model_info: ModelInfo,
    settings: WorkerSettings,
    *,
    control: Control | None = None,
    log: Log | None = None,
) -> int:
    """Serve until told to stop: by SIGTERM or SIGINT, or by `control`. Returns the exit code.

    Raises StartupError, one clear sentence, where the server cannot be reached or used.
    """
    service = Service(engine, tokenizer, model_info, settings, control=control, log=log)
    try:
        service.start()
        return service.run()
    finally:
        service.close()


@dataclass(frozen=True, slots=True)
class _Started:
    links: Links
    leases: LeaseThread
    loop: Loop


class Service:
    """One worker: `start`, then `run` to the end, then `close`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        model_info: ModelInfo,
        settings: WorkerSettings,
        *,
        control: Control | None = None,
        log: Log | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._control = control or Control()
        self._started: _Started | None = None
        leases = Leases(settings)
        log, worker = log or make_log(), worker_name()
        self.context = Context(
            settings=settings,
            keys=Keys(settings.prefix, settings.queue),
            worker=worker,
            model=model_info,
            log=log,
            alarms=Alarms(log, worker, parse_address(settings.url).user),
            counters=Counters(),
            clock=ServerClock(),
            leases=leases,
            memory=Memory(leases),
            stats=engine.stats(),
        )
        self._pool: PreparePool[Any] = PreparePool(
            settings.num_prepare_threads, settings.prepare_timeout_s, self._control.wake
        )

    @property
    def links(self) -> Links:
        """The connections. Raises RuntimeError before `start`."""
        return self._parts().links

    @property
    def loop(self) -> Loop:
        """The step loop. Raises RuntimeError before `start`."""
        return self._parts().loop

    def _parts(self) -> _Started:
        if self._started is None:
            raise RuntimeError("the worker has not been started")
        return self._started

    def start(self) -> None:
        """Connect, look at the server, announce the worker. Raises StartupError."""
        context = self.context
        links = make_links(context.settings, context.keys, context.worker)
        self._started = started = self._build(links)
        sent_s = time.monotonic()
        time_reply, beat = links.writing.exchange([(b"TIME",), started.leases.heartbeat(stalled=False)])
        if isinstance(beat, Failed):
            raise ServerUnavailableError(f"the server takes no writes: {beat.code} {beat.message}")
        context.clock.set(time_reply, sent_s)
        started.leases.start()
        context.log.info("ready", worker=context.worker, queue=context.settings.queue)

    def _build(self, links: Links) -> _Started:
        context, control, engine, pool = self.context, self._control, self._engine, self._pool
        settings = context.settings
        outbox = Outbox(context)
        running = Running(context, outbox, engine, self._tokenizer)
        starter = Starter(context, outbox, running, engine, self._tokenizer, pool)
        beginner = Beginner(context, outbox, starter, pool)

        def on_held(held: Held) -> None:
            if held.stage is Stage.DECODE:
                beginner.decode(held)

        inbox = Inbox(context, on_held)
        waiter = Waiter(links.waiting, control, inbox, block_s=settings.block_s, slack_s=settings.socket_timeout_s)
        drain = Drain(context, control, running)
        settler = Settler(context, outbox=outbox, beginner=beginner, starter=starter, running=running, pool=pool)
        parts = Parts(inbox, outbox, beginner, running, settler, waiter, drain, Janitor(context))
        return _Started(
            links=links,
            leases=LeaseThread(
                links.leases,
                context.leases,
                settings,
                context.worker,
                clock=context.clock,
                heartbeat=Heartbeat(context, drain).command,
                wake=control.wake,
                alarms=context.alarms,
            ),
            loop=Loop(context, engine, control, links.writing, parts),
        )

    def run(self) -> int:
        """Serve to the end. Returns the exit code."""
        with self._control.handling_signals():
            completed = self.loop.run()
        self._leave()
        return EXIT_OK if completed else EXIT_ENGINE_FAILED

    def _leave(self) -> None:
        """Take this worker's name off the queue, where nothing is pending under it."""
        started, context = self._parts(), self.context
        started.leases.stop()
        link = started.links.writing
        if link.ensure():
            leave = lua.call(lua.LEAVE, context.keys.all_jobs, (context.worker,))
            link.exchange([leave, (b"DEL", context.keys.worker(context.worker))])
        context.log.info("ended", worker=context.worker, **context.counters.snapshot())

    def close(self) -> None:
        """Release threads and sockets, whatever state they are in."""
        if self._started is not None:
            self._started.leases.stop()
            self._started.links.close()
        self._pool.close()


def worker_name() -> str:
    """A name that no other process has or had: host, pid, and something random."""
    host = re.sub(r"[^A-Za-z0-9_.\-]", "-", socket.gethostname())[:64] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
