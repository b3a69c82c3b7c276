"""`headrace worker`: what it refuses at start, and that it serves."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from headrace.worker.cli import run
from headrace.worker.exit_codes import ExitCode
from tests.support.command import Outcome, Spawn
from tests.support.server import Server


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "no-such-folder", "./a/b", "a/b/c", "x" * 5000, "~nobody-of-this-name"]
)
def test_a_model_that_is_nowhere_is_one_line(call: Callable[..., Outcome], server: Server, name: str) -> None:
    outcome = call("worker", "--model", name, "--redis-url", server.url)
    assert outcome.code == ExitCode.MODEL
    assert name in outcome.line


def test_a_folder_without_a_model_is_one_line(call: Callable[..., Outcome], server: Server, tmp_path: Path) -> None:
    outcome = call("worker", "--model", str(tmp_path), "--redis-url", server.url)
    assert outcome.code == ExitCode.MODEL
    assert str(tmp_path) in outcome.err.splitlines()[-1]
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(("flag", "value"), [("--device", "cuda"), ("--dtype", "float16")])
def test_what_is_not_built_yet_is_refused_by_name(
    call: Callable[..., Outcome], server: Server, flag: str, value: str
) -> None:
    outcome = call("worker", "--model", "demo", "--redis-url", server.url, flag, value)
    assert outcome.code == ExitCode.UNSUPPORTED
    line = outcome.err.splitlines()[-1]
    assert line.startswith("headrace worker: ") and value in line
    assert "Traceback" not in outcome.err


def test_a_check_says_what_is_there(call: Callable[..., Outcome], server: Server) -> None:
    outcome = call("worker", "--model", "demo", "--check", "--redis-url", server.url, "--num-kv-blocks", "100")
    assert outcome == Outcome(0, f"ready to serve demo from queue default at {server.url}\n", outcome.err)
    assert "kv_blocks=100" in outcome.err


def test_a_worker_with_a_server_of_its_own_serves_and_ends(spawn: Spawn) -> None:
    """The whole command as a process: it starts its server, takes a job from another process, and drains on SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    worker = spawn("worker", "--model", "demo", "--embedded", "--port", port)
    url = f"redis://127.0.0.1:{port}/0"
    deadline = time.monotonic() + 60
    while run(["health", "--redis-url", url]) and time.monotonic() < deadline:
        assert worker.poll() is None
        time.sleep(0.1)
    client = spawn("submit", "Once upon a time", "--max-tokens", "5", "--redis-url", url)
    out, err = client.communicate(timeout=30)
    assert (client.returncode, err) == (0, ""), out
    assert out.strip()
    worker.send_signal(signal.SIGTERM)
    _, log = worker.communicate(timeout=30)
    assert worker.returncode == 0, log
    assert 'event="loaded the model"' in log and "event=ready" in log
    with pytest.raises(redis.ConnectionError):
        redis.Redis.from_url(url).ping()  # its server has ended with it


def test_the_server_is_looked_at_before_the_model_is_loaded(call: Callable[..., Outcome]) -> None:
    outcome = call("worker", "--model", "demo", "--redis-url", "redis://:secret@127.0.0.1:1")
    assert outcome.code == ExitCode.SERVER_UNAVAILABLE
    assert "secret" not in outcome.line


def test_a_server_that_may_evict_is_refused(call: Callable[..., Outcome], own_server: Callable[..., Server]) -> None:
    server = own_server("--maxmemory-policy", "allkeys-lru")
    outcome = call("worker", "--model", "demo", "--redis-url", server.url)
    assert outcome.code == ExitCode.SERVER_UNSUITABLE
    assert "noeviction" in outcome.line
