"""Processes as the kernel knows them, and waiting for something to come true."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether process `pid` runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(pid: int) -> dict[int, str]:
    """Processes whose parent is `pid`: what they run, by their ids."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # gone meanwhile
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Whether `condition` comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
