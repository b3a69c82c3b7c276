"""`headrace worker`, and `headrace demo`, which starts one."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ..clients.address import redact_address
from ..clients.keys import Keys
from .child import ended_in_order
from .command import command
from .embedded import EmbeddedServer, ServerOptions
from .exit_codes import ExitCode
from .extra import require_extra
from .links import open_link
from .load_view import load_progress
from .model_place import DEMO_MODEL, model_place
from .reach import TIMEOUT_S
from .settings import DemoFlags, WorkerFlags

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.types import ModelInfo, Tokenizer
    from .log import Log


@command(WorkerFlags)
def worker(settings: WorkerFlags) -> ExitCode:
    """Serve a model: take jobs from a queue, write their tokens to streams."""
    require_extra()
    with ended_in_order(), _server(settings) as url:
        return _serve(settings, url)


@command(DemoFlags)
def demo(settings: DemoFlags) -> ExitCode:
    """Show it: a server, a worker and several prompts side by side; ends by itself."""
    from .demo import run_demo

    with ended_in_order():
        return run_demo(settings)


def _serve(settings: WorkerFlags, url: str) -> ExitCode:
    worker_settings = settings.worker_settings(url)
    place = model_place(settings.model, settings.revision)
    keys = Keys(settings.prefix, settings.queue)
    open_link(url, TIMEOUT_S, "headrace-check", keys).close()  # before the model is loaded: that takes its time
    from . import service
    from .interpreter import settle_interpreter
    from .log import make_log

    log = make_log()
    log.info("loading the model", model=settings.model)
    engine, tokenizer, model = _load(settings, place, log)
    if settings.check:
        sys.stdout.write(f"ready to serve {model.name} from queue {settings.queue} at {redact_address(url)}\n")
        return ExitCode.OK
    settle_interpreter()
    code = service.run(engine, tokenizer, model, worker_settings, log=log)
    return ExitCode.OK if code == service.EXIT_OK else ExitCode.INTERNAL


def _load(settings: WorkerFlags, place: str, log: Log) -> tuple[Engine, Tokenizer, ModelInfo]:
    from ..engine.threads import configure_threads

    begun_s = time.monotonic()
    num_threads = configure_threads(settings.num_threads)  # before anything else imports torch
    from ..engine.load import load_engine
    from ..engine.runner import TorchRunner

    with load_progress(log) as progress:
        engine, tokenizer, model = load_engine(place, settings.engine_config(), progress, revision=settings.revision)
    if settings.model == DEMO_MODEL:
        model = replace(model, name=DEMO_MODEL)  # not the folder that this machine happens to have it in
    runner = engine.runner
    log.info(
        "loaded the model",
        model=model.name,
        dtype=str(runner.dtype).removeprefix("torch.") if isinstance(runner, TorchRunner) else "",
        kv_blocks=engine.stats().total_blocks,
        **({"window_blocks": runner.num_window_blocks} if runner.num_window_blocks else {}),
        block_size=runner.block_size,
        max_model_len=engine.max_model_len,
        threads=num_threads,
        seconds=round(time.monotonic() - begun_s, 1),
    )
    return engine, tokenizer, model


@contextmanager
def _server(settings: WorkerFlags) -> Generator[str]:
    """The address to use: of an embedded server that lives as long as the worker, or as the flags say."""
    if not settings.embedded:
        yield settings.url()
        return
    with EmbeddedServer(ServerOptions(binary=settings.server, port=settings.port)) as server:
        yield server.url
