"""How the demo looks: panels that grow side by side on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from .demo_totals import Totals, Track

_REFRESH_PER_S = 8  # the worker needs the processor more than the screen does
_PANEL_WIDTH = 26  # cells, at least
_MAX_COLUMNS = 4
_BORDER_LINES = 2
_SPARE_LINES = 2


class View(Protocol):
    """What the demo shows, and when."""

    def starting(self, progress: Callable[[], str]) -> AbstractContextManager[None]:
        """While the worker starts: `progress` gives what it does at the moment."""
        ...

    def running(self, tracks: Sequence[Track]) -> AbstractContextManager[None]:
        """While the requests run."""
        ...

    def ended(self, track: Track) -> None:
        """A request has ended."""
        ...

    def say(self, line: str) -> None:
        """A line of its own."""
        ...


def make_view() -> View:
    """Panels if standard output is a terminal that is large enough for them, else lines."""
    if not sys.stdout.isatty():
        return LineView()
    console = Console(highlight=False)
    return LineView() if console.is_dumb_terminal or console.height < 16 or console.width < 60 else PanelView(console)


class LineView:
    """Plain text without escape sequences, one line per event."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()

    def starting(self, progress: Callable[[], str]) -> AbstractContextManager[None]:
        """Say it once."""
        del progress
        self.say("starting a server and a worker …")
        return nullcontext()

    def running(self, tracks: Sequence[Track]) -> AbstractContextManager[None]:
        """Say it once."""
        self.say(f"{len(tracks)} requests go into the queue")
        return nullcontext()

    def ended(self, track: Track) -> None:
        """Give the whole text."""
        text = " ".join((track.prompt.shown + track.text).split())
        self.say(f"{track.prompt.title} ({describe(track)}): {text}")

    def say(self, line: str) -> None:
        """Write it with the seconds since the beginning."""
        sys.stdout.write(f"{time.monotonic() - self._begun_s:5.1f} s  {line}\n")
        sys.stdout.flush()


class PanelView:
    """A grid of panels, one per request, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def starting(self, progress: Callable[[], str]) -> Generator[None]:
        """A spinner with what the worker does at the moment."""
        spinner = Spinner("dots")

        def render() -> RenderableType:
            spinner.update(text=Text.assemble("starting a server and a worker  ", (progress(), "dim")))
            return spinner

        live = Live(console=self._console, get_renderable=render, transient=True, refresh_per_second=_REFRESH_PER_S)
        with live:
            yield

    @contextmanager
    def running(self, tracks: Sequence[Track]) -> Generator[None]:
        """The grid; its last state stays on the screen."""
        live = Live(
            console=self._console,
            get_renderable=lambda: self.grid(tracks),
            refresh_per_second=_REFRESH_PER_S,
            vertical_overflow="crop",
        )
        with live:
            yield

    def ended(self, track: Track) -> None:
        """Its panel shows it."""

    def say(self, line: str) -> None:
        """Write it below the grid."""
        self._console.print(Text(line))

    def grid(self, tracks: Sequence[Track]) -> RenderableType:
        """All panels, as large as the terminal allows."""
        width, height = self._console.size
        num_columns = max(1, min(_MAX_COLUMNS, width // _PANEL_WIDTH, len(tracks)))
        num_rows = math.ceil(len(tracks) / num_columns)
        panel_height = max(_BORDER_LINES + 1, (height - _SPARE_LINES) // num_rows)
        table = Table.grid(expand=True)
        for _ in range(num_columns):
            table.add_column(ratio=1)
        panel_width = width // num_columns
        panels = [self._panel(track, panel_width, panel_height) for track in tracks]
        for first in range(0, len(panels), num_columns):
            table.add_row(*panels[first : first + num_columns])
        num_tokens = sum(track.num_tokens for track in tracks)
        num_running = sum(track.first_token_s is not None and track.ended_s is None for track in tracks)
        return Group(table, Text(f"{num_running} running, {num_tokens} tokens so far", style="dim"))

    def _panel(self, track: Track, width: int, height: int) -> Panel:
        """The newest lines of a request; lines are as wide as their characters' cells, not as many characters."""
        text = Text.assemble((track.prompt.shown, "dim"), track.text)
        lines = text.wrap(self._console, max(1, width - 4))
        shown = Text("\n").join(lines[-(height - _BORDER_LINES) :])
        mark, style = _look(track)
        return Panel(
            shown,
            title=Text.assemble((f"{mark} ", style), (track.prompt.title, "bold")),
            title_align="left",
            subtitle=Text(describe(track), style="dim"),
            subtitle_align="right",
            border_style=style,
            height=height,
        )


def describe(track: Track) -> str:
    """Where a request stands, in a few words."""
    notes = list(track.prompt.notes)
    if track.reason is not None:
        return ", ".join([*notes, track.reason, f"{track.num_tokens} tokens"])
    if track.first_token_s is not None:
        return ", ".join([*notes, f"{track.num_tokens} tokens"])
    return ", ".join([*notes, "to come" if track.sent_s is None else "queued" if track.started_s is None else "begun"])


def totals_text(numbers: Totals) -> str:
    """The totals in a few aligned lines."""
    rate = f"{numbers.tokens_per_s:.0f} tokens/s"
    rows = [
        ("output", f"{numbers.num_tokens} tokens of {numbers.num_requests} requests in {numbers.wall_s:.1f} s: {rate}"),
        (
            "first token",
            f"{numbers.first_token_p50_s:.2f} s (median), {numbers.first_token_max_s:.2f} s (longest wait)",
        ),
    ]
    if numbers.hurry_first_token_s is not None:
        rows.append(("in a hurry", f"{numbers.hurry_first_token_s:.2f} s to its first token, past all that waited"))
    if numbers.mean_rows is not None:
        rows.append(("batch", f"{numbers.mean_rows:.1f} sequences per step on average"))
    share = numbers.cached_tokens / numbers.prompt_tokens if numbers.prompt_tokens else 0.0
    rows.append(
        (
            "prefix cache",
            f"{numbers.cached_tokens} of {numbers.prompt_tokens} prompt tokens not computed again ({share:.0%})",
        )
    )
    return "\n".join(f"{name:>14}  {value}" for name, value in rows)


def _look(track: Track) -> tuple[str, str]:
    """A mark and a colour."""
    if track.problem and track.ended_s is not None:
        return "✗", "red"
    if track.reason == "cancelled":
        return "■", "yellow"
    if track.ended_s is not None:
        return "✓", "green"
    return ("▶", "cyan") if track.first_token_s is not None else ("·", "white")
