"""The embedded server: a real process that answers, and that is gone with whoever started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from headrace.worker.embedded import EmbeddedServer, EmbeddedServerError, ServerOptions, find_binary
from headrace.worker.exit_codes import ExitCode
from tests.support.processes import is_running, wait_until
from tests.support.server import Server, redis_binary

# Starts a server, prints its pid, and then does what the test asks of it.
OWNER = """
import sys, time
from headrace.worker.embedded import EmbeddedServer
server = EmbeddedServer()
print(server.pid, server.log_path.parent, flush=True)
{then}
"""


def owner(then: str) -> tuple[subprocess.Popen[str], int, Path]:
    """A process of its own that owns a server: the process, the server's pid, the server's folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(then=then)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    pid, _, folder = process.stdout.readline().strip().partition(" ")
    return process, int(pid), Path(folder)


def test_it_serves_on_loopback_without_eviction_and_leaves_nothing() -> None:
    with EmbeddedServer() as server:
        client = redis.Redis.from_url(server.url, decode_responses=True)
        assert client.ping()
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        assert client.config_get("appendonly") == {"appendonly": "no"}
        pid, folder = server.pid, server.log_path.parent
        assert is_running(pid) and folder.is_dir()
    assert not is_running(pid)
    assert not folder.exists()
    server.stop()  # a second time does nothing


def test_a_given_port_is_used_and_a_taken_one_is_refused() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with EmbeddedServer(ServerOptions(port=port)) as server:
        assert server.url == f"redis://127.0.0.1:{port}/0"
        with pytest.raises(EmbeddedServerError, match="Address already in use") as caught:
            EmbeddedServer(ServerOptions(port=port))
        assert caught.value.code == ExitCode.EMBEDDED_SERVER
        assert redis.Redis.from_url(server.url).ping()  # the first is still there


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_a_killed_owner(how: signal.Signals) -> None:
    process, pid, _ = owner("time.sleep(60)")
    assert is_running(pid)
    process.send_signal(how)
    process.wait(5)
    assert wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize("then", ["sys.exit(3)", "raise RuntimeError", "pass"])
def test_it_ends_with_an_owner_that_forgets_it(then: str) -> None:
    process, pid, folder = owner(then)
    process.wait(5)
    assert wait_until(lambda: not is_running(pid))
    assert not folder.exists()


def test_an_interrupt_from_the_terminal_is_not_for_the_server() -> None:
    with EmbeddedServer() as server:
        assert os.getsid(server.pid) == server.pid != os.getsid(0)


def test_it_outlives_the_thread_that_started_it() -> None:
    started: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedServer()))
    thread.start()
    thread.join()
    with started[0] as server:
        time.sleep(0.05)
        assert redis.Redis.from_url(server.url).ping()


def test_a_binary_that_fails_says_why() -> None:
    with pytest.raises(EmbeddedServerError, match=r"ended at start: .*no-such-setting") as caught:
        EmbeddedServer(ServerOptions(arguments=("--no-such-setting", "1")))
    assert "\n" not in str(caught.value)


def test_a_binary_that_is_none_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    for path in (plain, tmp_path / "missing"):
        with pytest.raises(EmbeddedServerError, match="no such program"):
            find_binary(path)
    plain.chmod(0o755)
    with pytest.raises(EmbeddedServerError, match=r"cannot run|ended at start"):
        EmbeddedServer(ServerOptions(binary=plain))


def test_a_program_that_never_answers_is_ended(tmp_path: Path) -> None:
    mute = tmp_path / "mute"
    mute.write_text(f'#!/bin/sh\necho $$ > "{tmp_path}/pid"\nexec sleep 60\n')
    mute.chmod(0o755)
    with pytest.raises(EmbeddedServerError, match="did not answer on port"):
        EmbeddedServer(ServerOptions(binary=mute, start_timeout_s=0.5))
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(redis_binary() is None, reason="no Redis binary on this machine")
def test_another_binary_is_used() -> None:
    with EmbeddedServer(ServerOptions(binary=redis_binary())) as server:
        info = redis.Redis.from_url(server.url).info("server")
        assert info["executable"] == str(redis_binary())


def test_a_test_server_keeps_its_data_over_a_kill(own_server: Callable[..., Server]) -> None:
    server = own_server(appendonly=True)
    port = server.port
    server.client().set("a", "1")
    server.kill()
    with pytest.raises(redis.ConnectionError):
        server.client().ping()
    server.restart()
    assert server.port == port
    assert server.client().get("a") == b"1"
