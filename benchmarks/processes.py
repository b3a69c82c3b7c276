"""Fresh processes that print one line of JSON, and what the kernel says of processes: CPU seconds, resident memory."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TIMEOUT_S = 1800.0


class RunError(RuntimeError):
    """A run that did not end well; the message holds the end of what it said."""


def print_result(result: Any) -> None:
    """Print a dataclass as the line that `fresh` reads."""
    print(json.dumps(dataclasses.asdict(result)), flush=True)


def environment() -> dict[str, str]:
    """The variables of measured processes: none of the worker's own, and threads that sleep while they wait."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    kept.setdefault("OMP_WAIT_POLICY", "passive")
    path = os.pathsep.join(each for each in (str(ROOT), kept.get("PYTHONPATH")) if each)
    return {**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def fresh(kind: type[T], module: str, *arguments: object) -> T:
    """Run a module of this package in a new process and read its last line as a `kind`. Raises RunError."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return kind(**last_json(run_program(command, environment())))


def run_program(command: list[str], variables: Mapping[str, str], timeout_s: float = _TIMEOUT_S) -> str:
    """Run a program to its end and give its standard output. Raises RunError."""
    try:
        done = subprocess.run(
            command, env=dict(variables), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{' '.join(command)} did not end within {timeout_s:g} s") from error
    except OSError as error:
        raise RunError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).splitlines()[-25:])
        raise RunError(f"{' '.join(command)} ended with code {done.returncode}:\n{said}")
    return done.stdout


def last_json(output: str) -> dict[str, Any]:
    """The last line that holds a JSON object. Raises RunError if none does."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise RunError(f"no result in the output: {output[-400:]!r}")


def cpu_seconds(pid: int) -> float:
    """User and system seconds that a process and its threads have used so far. Raises OSError if it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_bytes() -> int:
    """Memory that this process has in use, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Elapsed:
    """Seconds since a `Stopwatch` was made."""

    wall_s: float
    cpu_s: float


class Stopwatch:
    """Seconds on the wall, and CPU seconds of this process with all its threads, from now on."""

    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._wall_s = time.perf_counter()

    def read(self) -> Elapsed:
        """What has passed."""
        wall_s = time.perf_counter() - self._wall_s
        return Elapsed(wall_s, time.process_time() - self._cpu_s)
