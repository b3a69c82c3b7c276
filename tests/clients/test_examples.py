"""The examples run as they are, against a worker by hand."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.clients import Keys
from headrace.clients.job import decode_entry, decode_job
from tests.clients.hand_worker import HandWorker
from tests.support.server import Server, start_server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Server]:
    """A server with a worker that answers every job of the default queue with its prompt in upper case."""
    server = start_server(tmp_path)
    over = threading.Event()

    def work() -> None:
        keys, cursor = Keys(), "0"
        with server.client() as raw:
            while not over.is_set():
                for _, entries in raw.xread({keys.jobs(): cursor}, block=50):
                    for cursor, fields in entries:  # noqa: B007  (the last one is where to go on from)
                        entry = decode_entry(fields)
                        worker = HandWorker(raw, keys, entry.id, entry.kind)
                        worker.start()
                        worker.tokens(f" {decode_job(entry.payload, entry.kind).prompt}".upper())
                        worker.finish(text=".")

    thread = threading.Thread(target=work)
    thread.start()
    yield server
    over.set()
    thread.join()
    server.stop()


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("submit_and_stream.py", ["Hi"], " HI.\n"),
        ("bare_xadd.py", [], " HELLO.\n"),
        ("async_stream.py", [], "The cat THE CAT.\nA long time ago A LONG TIME AGO.\nIn the morning IN THE MORNING.\n"),
    ],
)
def test_an_example_prints_the_answer(answering: Server, name: str, arguments: list[str], expected: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments, answering.url],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.stdout, done.stderr) == (expected, "")
