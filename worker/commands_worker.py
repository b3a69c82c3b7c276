"""`headrace worker`, and `headrace demo`, which starts one."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import FrameType

from .command import command
from .connection_url import redact
from .embedded import EmbeddedServer, ServerOptions
from .exit_codes import CommandError, ExitCode
from .settings import DemoFlags, WorkerFlags

DEMO_MODEL = "demo"


@command(WorkerFlags)
def worker(settings: WorkerFlags) -> ExitCode:
    """Serve a model: take jobs from a queue, write their tokens to streams."""
    with _ended_in_order(), _server(settings) as url:
        return _serve(settings, url)


@command(DemoFlags)
def demo(settings: DemoFlags) -> ExitCode:
    """Show it: a server, a worker and several prompts side by side; ends by itself."""
    from .demo import run_demo

    return run_demo(settings)


def _serve(settings: WorkerFlags, url: str) -> ExitCode:
    from ..engine.load import load_engine
    from . import service
    from .log import make_log

    log = make_log()
    worker_settings = settings.worker_settings(url)
    log.info("loading the model", model=settings.model)
    engine, tokenizer, model = load_engine(model_place(settings.model), settings.engine_config())
    if settings.model == DEMO_MODEL:
        model = replace(model, name=DEMO_MODEL)  # not the folder that this machine happens to have it in
    log.info("ready", model=model.name, server=redact(url), queue=settings.queue)
    return ExitCode(service.run(engine, tokenizer, model, worker_settings))


@contextmanager
def _server(settings: WorkerFlags) -> Generator[str]:
    """The address to use: of an embedded server that lives as long as the worker, or as the flags say."""
    if not settings.embedded:
        yield settings.url()
        return
    with EmbeddedServer(ServerOptions(binary=settings.server, port=settings.port)) as server:
        yield server.url


def model_place(model: str) -> str:
    """The folder of the model that ships for `demo`; anything else as it is."""
    if model != DEMO_MODEL:
        return model
    config = files("headrace.demo_model").joinpath("config.json")
    if not config.is_file():
        raise CommandError("the demo model is not part of this installation", ExitCode.MODEL)
    return str(Path(str(config)).parent)


@contextmanager
def _ended_in_order() -> Generator[None]:
    """Until the worker has its own handler, SIGTERM unwinds the stack, so that what was started is ended too."""

    def terminate(number: int, frame: FrameType | None) -> None:
        del number, frame
        sys.exit(ExitCode.TERMINATED)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
