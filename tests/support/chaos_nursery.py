"""A program that forks workers on request, so that a killed one is replaced in milliseconds: the imports are made once.

    python -m tests.support.chaos_nursery

Reads one JSON map a line from standard input and answers with one a line: `{"spawn": {…}, "log": PATH}` with
`{"pid": N}`, `{"reap": PID}` with `{"code": N}`, null while it runs. Each worker is a process of its own, with its own
connections, clock and name, and ends with this one. A spawn's options are the fields of `WorkerSettings`, and:

    step_time_s, max_num_seqs, num_blocks, max_model_len   of the model and the engine
    max_num_batched_tokens                                 (EngineConfig)
    fates            list of [request id, position, signal, choice]: see `chaos_model.Fate`
    clock_off_s      how far the wall clock of this process is off
    uptime_off_s     how far its monotonic clock is
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
from typing import Any

from headrace.engine.engine import Engine
from headrace.engine.types import EngineConfig, ModelInfo
from headrace.worker.errors import StartupError
from headrace.worker.options import WorkerSettings
from headrace.worker.service import run
from tests.support.chaos_model import ChaosRunner, Fate
from tests.support.scripted import ByteTokenizer

MODEL = ModelInfo("chaos", "c" * 64)
CANNOT_START = 3  # exit code of a worker that met trouble before it served
_PR_SET_PDEATHSIG = 1


def shift_clocks(clock_off_s: float, uptime_off_s: float) -> None:
    """Put this process's clocks off. Whatever it asks `time` for comes out shifted."""
    wall, wall_ns, monotonic = time.time, time.time_ns, time.monotonic
    time.time = lambda: wall() + clock_off_s
    time.time_ns = lambda: wall_ns() + int(clock_off_s * 1e9)
    time.monotonic = lambda: monotonic() + uptime_off_s


def serve(options: dict[str, Any]) -> int:
    """Be a worker to its end; the exit code."""
    shift_clocks(options.get("clock_off_s", 0.0), options.get("uptime_off_s", 0.0))
    sys.stderr.write(f"clock={time.time():.0f} monotonic={time.monotonic():.0f}\n")
    names = {field.name for field in dataclasses.fields(WorkerSettings)}
    settings = WorkerSettings(**{name: value for name, value in options.items() if name in names})
    runner = ChaosRunner(
        step_time_s=options.get("step_time_s", 0.0),
        num_blocks=options.get("num_blocks", 512),
        max_model_len=options.get("max_model_len", 512),
        fates=[
            Fate(request_id, position, signal.Signals(number), choice)
            for request_id, position, number, choice in options.get("fates", ())
        ],
    )
    config = EngineConfig(
        max_num_seqs=options.get("max_num_seqs", 16), max_num_batched_tokens=options.get("max_num_batched_tokens", 512)
    )
    try:
        return run(Engine(runner, config, clock=time.monotonic), ByteTokenizer(), MODEL, settings)
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        return CANNOT_START


def _spawn(options: dict[str, Any], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with open(os.devnull, "r+b") as null, open(log, "ab") as out:  # noqa: PTH123
            os.dup2(null.fileno(), 0)
            os.dup2(null.fileno(), 1)
            os.dup2(out.fileno(), 2)
        code = serve(options)
    except BaseException as error:  # noqa: BLE001  whatever it is, it must not fall back into the parent's loop
        sys.stderr.write(f"worker failed: {error!r}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reap(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> None:
    """Answer requests until standard input ends; then no worker is left."""
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "spawn" in request:
            pid = _spawn(request["spawn"], request["log"])
            alive.add(pid)
            answer: dict[str, Any] = {"pid": pid}
        else:
            code = _reap(request["reap"])
            if code is not None:
                alive.discard(request["reap"])
            answer = {"code": code}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
