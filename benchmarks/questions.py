"""All benchmarks by name, and the tests of what each measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import backlog, cached_blocks, first_token, host_cost, leak, memory, million, readers, scaling, streams, whole
from .sections import Section
from .settings import Say, Settings

_MODEL = (
    "tests/kernels", "tests/engine/test_decoder.py", "tests/engine/test_logits.py", "tests/engine/test_neighbours.py",
)  # fmt: skip
_ENGINE = (
    "tests/engine/test_engine_scripted.py",
    "tests/engine/test_scheduler.py",
    "tests/engine/test_prefix_cache.py",
)
_QUEUE = ("tests/worker/test_with_client.py", "tests/worker/test_end_to_end.py", "tests/e2e")
_WORKER = ("tests/worker/test_end_to_end.py", "tests/worker/test_writer.py")
_READER = ("tests/clients/test_reader.py", "tests/clients/test_stream.py")


@dataclass(frozen=True, slots=True)
class Question:
    """One benchmark."""

    measure: Callable[[Settings, Say], Section]
    tests: tuple[str, ...]  # paths that must be green before it is reported


QUESTIONS: dict[str, Question] = {
    "w1": Question(whole.w1, (*_MODEL, *_ENGINE)),
    "streams": Question(streams.section, (*_MODEL, *_ENGINE)),
    "w2": Question(whole.w2, (*_MODEL, *_ENGINE, *_QUEUE, *_READER)),
    "w3": Question(whole.w3, (*_MODEL, *_ENGINE)),
    "tax": Question(whole.tax, (*_MODEL, *_ENGINE, *_QUEUE, *_READER)),
    "host": Question(host_cost.section, (*_ENGINE, *_WORKER)),
    "first_token": Question(first_token.section, (*_MODEL, *_ENGINE, *_QUEUE, *_READER)),
    "scaling": Question(scaling.section, (*_MODEL, *_ENGINE)),
    "cached": Question(cached_blocks.section, (*_MODEL, *_ENGINE, "tests/engine/test_block_pool.py")),
    "backlog": Question(backlog.section, (*_MODEL, *_ENGINE, *_WORKER)),
    "readers": Question(readers.section, (*_MODEL, *_QUEUE, *_READER)),
    "memory": Question(memory.section, ("tests/clients/test_submit.py", *_WORKER)),
    "million": Question(
        million.section, (*_QUEUE, "tests/worker/test_cli_watch.py", "tests/worker/test_doctor_queue.py")
    ),
    "leak": Question(leak.section, (*_MODEL, *_ENGINE, "tests/engine/test_faults_leaks.py")),
}
