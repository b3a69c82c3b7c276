"""The command where standard streams are closed or full, as supervisors and shells leave them."""

from __future__ import annotations

import subprocess

import pytest

from headrace.worker.exit_codes import ExitCode
from tests.support.command import PROGRAM
from tests.support.server import Server


def shell(redirect: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", *PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("redirect", [">&-", "<&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_error(server: Server, queue: str, redirect: str) -> None:
    done = shell(redirect, "status", "--json", "--redis-url", server.url, "--queue", queue)
    assert done.returncode == ExitCode.OK, done.stderr


def test_a_prompt_from_a_closed_standard_input_is_refused_in_one_line(server: Server, queue: str) -> None:
    done = shell("<&-", "submit", "-", "--redis-url", server.url, "--queue", queue, "--timeout", "1s")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_one_line(server: Server, queue: str) -> None:
    done = shell(">/dev/full", "status", "--redis-url", server.url, "--queue", queue)
    assert done.returncode == ExitCode.INTERNAL
    assert done.stderr.count("\n") == 1
    assert "no space left" in done.stderr
