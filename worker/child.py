"""Child processes that end with their owner.

On Linux the kernel sends a child SIGKILL when its parent dies in whatever way (PR_SET_PDEATHSIG). That is set by a
small program which then becomes the child, since code between fork and exec is not safe in a process with threads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from .exit_codes import ExitCode

# argv: pid of the parent, the child's command. PR_SET_PDEATHSIG is 1; the parent may have died before it was set.
_TIED_TO_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def start_child(
    command: Sequence[str], output: IO[bytes], *, folder: Path | None = None, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` (its first word a path) with what it says going to `output`. Raises OSError.

    Ctrl-C in the terminal does not reach it: its owner ends it, in an order of its own. Start it from the main thread:
    the kernel takes the end of the thread that started a child for the end of the parent, so from another thread the
    child is not tied to the parent.
    """
    words = list(command)
    if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
        words = [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid()), *words]
    return subprocess.Popen(  # noqa: S603  (the command is the caller's own)
        words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=folder,
        env=None if variables is None else {**os.environ, **variables},
        start_new_session=True,
    )


def end_child(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Ask it to end (SIGTERM), and after `timeout_s` (at once, if that is 0) kill it; give its exit code."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM if timeout_s > 0 else signal.SIGKILL)
    try:
        return process.wait(timeout_s or None)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextmanager
def ended_in_order() -> Generator[None]:
    """SIGTERM unwinds the stack, so that children are ended too, in order and with exit code TERMINATED."""

    def terminate(number: int, frame: FrameType | None) -> None:
        del number, frame
        sys.exit(ExitCode.TERMINATED)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
