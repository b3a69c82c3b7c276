"""`python -m benchmarks`: run benchmarks, keep their results and write the report.

The tests of what is measured run first; if one is red, nothing is measured and the exit code is 2. A benchmark that
fails is named, the others go on, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from . import peers, report
from .gate import Gate, RedTestsError
from .machine import Machine, read_machine
from .models import models_dir
from .pairs import LEAST_PAIRS
from .processes import ROOT, RunError
from .questions import QUESTIONS
from .settings import Settings

EXIT_OK, EXIT_FAILED, EXIT_RED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; give the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure and report.")
    parser.add_argument("--only", default="", help=f"some of: {' '.join(QUESTIONS)}")
    parser.add_argument("--quick", action="store_true", help="short runs that only show that everything works")
    parser.add_argument("--pairs", type=int, default=None, help=f"alternating pairs, {LEAST_PAIRS} by default")
    parser.add_argument("--out", type=Path, default=None, help="folder of the report")
    given = parser.parse_args(arguments)
    names = given.only.replace(",", " ").split() or list(QUESTIONS)
    if unknown := [name for name in names if name not in QUESTIONS]:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(QUESTIONS)}")
    settings = Settings(models_dir(), given.quick, given.pairs or (1 if given.quick else LEAST_PAIRS))
    machine, console = read_machine(), Console(stderr=True, highlight=False)
    folder = given.out or _folder(machine, given.quick)
    try:
        _require_tests(names, Gate(), console)
    except RedTestsError as error:
        console.print(str(error), markup=False, style="red")
        return EXIT_RED
    failed = [name for name in names if not _measure(name, settings, machine, folder, console)]
    if list(folder.glob("*.json")):
        print(report.write(folder, list(QUESTIONS)))
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="red")
    return EXIT_FAILED if failed else EXIT_OK


def _folder(machine: Machine, quick: bool) -> Path:
    name = f"{datetime.now(UTC):%Y-%m-%d}-{machine.slug}{'-quick' if quick else ''}"
    return ROOT / "benchmarks" / "results" / name


def _require_tests(names: Sequence[str], gate: Gate, console: Console) -> None:
    paths = list(dict.fromkeys(path for name in names for path in QUESTIONS[name].tests))
    console.print(f"tests of what is measured: {len(paths)} paths", style="dim")
    begun_s = time.monotonic()
    gate.require(paths)
    console.print(f"green after {time.monotonic() - begun_s:.0f} s", style="dim")


def _measure(name: str, settings: Settings, machine: Machine, folder: Path, console: Console) -> bool:
    """Run one benchmark and keep its result. Whether it went well."""
    begun_s = time.monotonic()

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - begun_s:7.1f} s  [bold]{name:12}[/bold] {what}")

    try:
        section = QUESTIONS[name].measure(settings, say)
    except (RunError, FileNotFoundError) as error:
        console.print(f"{name}: {error}", markup=False, style="red")
        return False
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    record = report.Record(section, machine, date, settings.quick, tuple(peers.missing()))
    say(f"done, {report.save(record, folder).name}")
    return True


if __name__ == "__main__":
    sys.exit(main())
