"""Builds a worker out of its parts and runs it to its end."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..clients.keys import Keys
from ..engine.types import ModelInfo, Tokenizer
from . import lua
from .begin import Beginner
from .clock import ServerClock
from .connection import Failed, Link
from .connection_url import redact
from .context import Context
from .control import Control
from .drain import Drain
from .errors import LinkError, ServerUnavailableError
from .heartbeat import Heartbeat
from .held import Held, Memory, Stage
from .inbox import Inbox
from .lease import Leases, LeaseThread
from .log import Counters, Log, make_log
from .loop import Loop, Parts
from .options import WorkerSettings
from .outbox import Outbox
from .prepare import PreparePool
from .running import Running
from .server_check import check_server
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


@dataclass(slots=True)
class _Links:
    """Three connections, so that none waits for another: writing, waiting for jobs, renewing leases."""

    writing: Link
    waiting: Link
    leases: Link


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
        self._control = control or Control()
        self._settings = settings
        worker = worker_name()
        leases = Leases(settings)
        self.context = Context(
            settings=settings,
            keys=Keys(settings.prefix, settings.queue),
            worker=worker,
            model=model_info,
            log=log or make_log(),
            counters=Counters(),
            clock=ServerClock(),
            leases=leases,
            memory=Memory(leases),
            stats=engine.stats(),
        )
        self._links = _Links(
            writing=Link(settings.url, settings.socket_timeout_s, f"{worker}:writing"),
            waiting=Link(settings.url, settings.socket_timeout_s, f"{worker}:waiting"),
            leases=Link(settings.url, settings.socket_timeout_s, f"{worker}:leases"),
        )
        self._pool: PreparePool[Any] = PreparePool(
            settings.num_prepare_threads, settings.prepare_timeout_s, self._control.wake
        )
        self._build(engine, tokenizer)

    def _build(self, engine: Engine, tokenizer: Tokenizer) -> None:
        context, control, settings = self.context, self._control, self._settings
        outbox = Outbox(context)
        running = Running(context, outbox, engine)
        starter = Starter(context, outbox, running, engine, tokenizer, self._pool)
        beginner = Beginner(context, outbox, starter, self._pool)

        def on_held(held: Held) -> None:
            if held.stage is Stage.DECODE:
                beginner.decode(held)

        inbox = Inbox(context, on_held)
        waiter = Waiter(
            self._links.waiting, control, inbox, block_s=settings.block_s, slack_s=settings.socket_timeout_s
        )
        self.drain = Drain(context, control, running)
        self._heartbeat = Heartbeat(context, self.drain)
        self._lease_thread = LeaseThread(
            self._links.leases,
            context.leases,
            settings,
            context.worker,
            context.log,
            clock=context.clock,
            heartbeat=self._heartbeat.command,
            wake=control.wake,
        )
        settler = Settler(context, outbox=outbox, beginner=beginner, starter=starter, running=running, pool=self._pool)
        parts = Parts(inbox, outbox, beginner, running, settler, waiter, self.drain)
        self.loop = Loop(context, engine, control, self._links.writing, parts)

    def start(self) -> None:
        """Connect, look at the server, announce the worker. Raises StartupError."""
        link = self._links.writing
        try:
            link.connect()
        except LinkError as error:
            raise ServerUnavailableError(f"no server at {redact(self._settings.url)}: {error}") from error
        check_server(link)
        sent_s = time.monotonic()
        time_reply, beat = link.exchange([(b"TIME",), self._heartbeat.command(False)])
        if isinstance(beat, Failed):
            raise ServerUnavailableError(f"the server takes no writes: {beat.code} {beat.message}")
        self.context.clock.set(time_reply, sent_s)
        self._lease_thread.start()
        self.context.log.info("ready", worker=self.context.worker, queue=self._settings.queue)

    def run(self) -> int:
        """Serve to the end. Returns the exit code."""
        with self._control.handling_signals():
            completed = self.loop.run()
        self._leave()
        return EXIT_OK if completed else EXIT_ENGINE_FAILED

    def _leave(self) -> None:
        """Take this worker's name off the queue, where nothing is pending under it."""
        self._lease_thread.stop()
        link, context = self._links.writing, self.context
        if link.ensure():
            leave = lua.call(lua.LEAVE, context.keys.all_jobs, (context.worker,))
            link.exchange([leave, (b"DEL", context.keys.worker(context.worker))])
        context.log.info("ended", worker=context.worker, **context.counters.snapshot())

    def close(self) -> None:
        """Release threads and sockets, whatever state they are in."""
        self._lease_thread.stop()
        self._pool.close()
        for link in (self._links.writing, self._links.waiting, self._links.leases):
            link.close()


def worker_name() -> str:
    """A name that no other process has or had: host, pid, and something random."""
    host = re.sub(r"[^A-Za-z0-9_.\-]", "-", socket.gethostname())[:64] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
