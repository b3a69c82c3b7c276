"""How loading a model looks: a bar on a terminal, lines of log anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .log import Log

LINE_EVERY_S = 5.0
_GIB = float(1 << 30)
Progress = Callable[[int, int], None]  # (bytes of weights read, bytes in all)


@contextmanager
def load_progress(log: Log, clock: Callable[[], float] = time.monotonic) -> Generator[Progress]:
    """What to call with the bytes that have been read and those in all, as often as one likes.

    On a terminal a bar on standard error shows them, which is gone at the end; elsewhere there is a line of log every
    few seconds, so that a short load has none.
    """
    if not sys.stderr.isatty():
        yield _Lines(log, clock).show
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("weights"), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Lines of log, not too many."""

    def __init__(self, log: Log, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._next_s = clock() + LINE_EVERY_S

    def show(self, done: int, total: int) -> None:
        """Write a line if one is due."""
        if done < total and self._clock() >= self._next_s:
            self._next_s = self._clock() + LINE_EVERY_S
            percent = 100 * done // total
            self._log.info(
                f"loading the weights, {percent} %", gib=round(done / _GIB, 2), of_gib=round(total / _GIB, 2)
            )
