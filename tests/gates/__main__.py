"""The gates of the Triton kernels: compiled ahead of time for GPUs that are not there, for each version of Triton.

    python -m tests.gates     each model with a cache as its activations, the first with every cache: by the installed
                              Triton for each kind of GPU, by that of the current torch for CUDA for one
        --core                of that one Triton and one kind of GPU
        --all                 each model with every cache, each kind of GPU, and the oldest Triton too
        --write               write the table of needs: with --all anew, else where more is needed or new
        --report              write benchmarks/results/kernel_gates.md

A process compiles for one version of Triton and one kind of GPU only: Triton keeps things of the first target that it
compiled for, such as how it converts float8, for the rest of a process.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

from tests.gates.errors import errors_table
from tests.gates.judge import Done, check, needs, table_of
from tests.gates.versions import BUILD, CACHE, ROOT, import_path, pinned_versions
from tests.support.kernel_budget import PATH, largest, read_table, write_table

CAPABILITIES = (90, 80, 100)
CORE_CAPABILITY = 90
REPORT = ROOT / "benchmarks" / "results" / "kernel_gates.md"
ERRORS = BUILD / "kernel-errors"  # what the tests in the interpreter have found
SHOWN_EVERY = 25
Extent = Literal["core", "usual", "all"]


class Station(NamedTuple):
    """Where a worker is for."""

    triton: str
    capability: int


def tasks(extent: Extent) -> Iterator[tuple[Station, dict[str, Any]]]:
    """What is to be done, station by station."""
    from tests.support.kernel_launches import core, launches
    from tests.support.kernel_script import CAPABILITY, SCRIPTS

    own, current, oldest = version("triton"), *pinned_versions()
    versions = {"core": [own], "usual": [own, current], "all": [own, current, oldest]}[extent]
    for triton in dict.fromkeys(versions):
        every = extent == "all" or (extent == "usual" and triton == own)
        for capability in CAPABILITIES if every else (CORE_CAPABILITY,):
            station = Station(triton, capability)
            if capability == CAPABILITY:
                yield from ((station, {"script": name}) for name in SCRIPTS)
            for launch in launches(capability) if extent == "all" else core(capability):
                yield station, {"capability": capability, "launch": launch.name}


class Worker:
    """A process at a station; `ask` gives the answer to a task."""

    def __init__(self, station: Station) -> None:
        self.station = station
        env = {**os.environ, "TRITON_CACHE_DIR": str(CACHE), "TRITON_DEFAULT_FP_FUSION": "1"}
        env.pop("TRITON_INTERPRET", None)
        paths = [*import_path(station.triton), str(ROOT), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gates.worker"],
            env=env, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        pipes = self._process
        assert pipes.stdin is not None and pipes.stdout is not None
        pipes.stdin.write(json.dumps(task) + "\n")
        pipes.stdin.flush()
        line = pipes.stdout.readline()
        return json.loads(line) if line else {"error": "the worker has ended"}

    def close(self) -> None:
        self._process.communicate()


def work(waiting: queue.SimpleQueue[tuple[Station, dict[str, Any]]], done: list[Done], total: int) -> None:
    """Take tasks until there are none, with a worker at the station of each."""
    worker: Worker | None = None
    while True:
        try:
            station, task = waiting.get_nowait()
        except queue.Empty:
            break
        if worker is None or worker.station != station:
            if worker is not None:
                worker.close()
            worker = Worker(station)
        began_s = time.monotonic()
        answer = worker.ask(task)
        done.append(Done(station.triton, station.capability, task, answer, time.monotonic() - began_s))
        if "script" in task or len(done) % SHOWN_EVERY == 0 or len(done) == total:
            name = task.get("launch", f"script {task.get('script')}")
            print(
                f"gates: {len(done)} of {total}, Triton {station.triton}, sm_{station.capability}, {name}", flush=True
            )
    if worker is not None:
        worker.close()


def run(processes: int, extent: Extent) -> list[Done]:
    """Do all tasks."""
    waiting: queue.SimpleQueue[tuple[Station, dict[str, Any]]] = queue.SimpleQueue()
    everything = list(tasks(extent))
    for triton in {station.triton for station, _ in everything}:
        import_path(triton)  # installs it, before two workers do
    for each in everything:
        waiting.put(each)
    done: list[Done] = []
    total = waiting.qsize()
    threads = [threading.Thread(target=work, args=(waiting, done, total)) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gates")
    for flag in ("core", "all", "write", "report"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    began_s = time.monotonic()
    done = run(given.processes, "all" if given.all else "core" if given.core else "usual")
    if given.write:
        write_table(needs(done) if given.all else largest((*read_table().items(), *needs(done).items())))
    faults = check(done, read_table() if PATH.exists() else {})
    table = table_of(done, time.monotonic() - began_s) + errors_table(ERRORS)
    print(table)
    if given.report:
        REPORT.write_text(table)
    if faults:
        sys.exit("\n".join([*faults, f"gates: {len(faults)} faults"]))
    print("gates: passed")


if __name__ == "__main__":
    main()
