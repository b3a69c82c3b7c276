"""How the demo looks: panels that grow side by side on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from .demo_totals import Totals, Track

_REFRESH_PER_S = 8  # the worker needs the processor more than the screen does
_PANEL_WIDTH = 18  # cells, at least
_MAX_COLUMNS = 4
_LINE_LEN = 240  # characters of a text, without a terminal
_BORDER_LINES = 2
_BORDER_CELLS = 4
_SPARE_LINES = 2  # the line below the grid, and the cursor's


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

    def show_totals(self, numbers: Totals) -> None:
        """The end: all requests in numbers."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """How panels share a terminal; sizes in cells and lines, borders included."""

    num_columns: int
    panel_width: int
    panel_height: int

    @property
    def area(self) -> int:
        """Cells for the text of one panel; not above 0 if there is no room."""
        lines, cells = self.panel_height - _BORDER_LINES, self.panel_width - _BORDER_CELLS
        return lines * cells if min(lines, cells) > 0 else 0


def best_layout(num_panels: int, width: int, height: int) -> Layout | None:
    """The layout with most room for text; None if the terminal is too small for any."""
    layouts = [
        Layout(columns, width // columns, (height - _SPARE_LINES) // math.ceil(num_panels / columns))
        for columns in range(1, min(_MAX_COLUMNS, width // _PANEL_WIDTH) + 1)
    ]
    best = max(layouts, key=lambda layout: layout.area, default=None)
    return best if best is not None and best.area > 0 else None


def make_view(num_panels: int) -> View:
    """Panels if standard output is a terminal that is large enough for them, else lines."""
    if not sys.stdout.isatty():
        return LineView()
    console = Console(highlight=False)
    too_small = best_layout(num_panels, console.width, console.height) is None
    return LineView() if console.is_dumb_terminal or too_small else PanelView(console)


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
        """Give the beginning of its text."""
        text = textwrap.shorten(track.prompt.shown + track.text, _LINE_LEN, placeholder=" …")
        self.say(f"{track.prompt.title}{_priority_mark(track)} ({describe(track)}): {text}")

    def say(self, line: str) -> None:
        """Write it with the seconds since the beginning."""
        sys.stdout.write(f"{time.monotonic() - self._begun_s:5.1f} s  {line}\n")
        sys.stdout.flush()

    def show_totals(self, numbers: Totals) -> None:
        """One line for each."""
        for name, value in total_rows(numbers):
            self.say(f"{name}: {value}")


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
        """Write it below what is there."""
        self._console.print(Text(line, style="dim"))

    def show_totals(self, numbers: Totals) -> None:
        """An aligned list below the grid."""
        for name, value in total_rows(numbers):
            self._console.print(Text.assemble((f"{name:>14}  ", "bold"), value))

    def grid(self, tracks: Sequence[Track]) -> RenderableType:
        """All panels, as large as the terminal allows."""
        layout = best_layout(len(tracks), *self._console.size)
        if layout is None:  # it has become too small meanwhile
            return Text("")
        table = Table.grid(expand=True)
        for _ in range(layout.num_columns):
            table.add_column(ratio=1)
        panels = [self._panel(track, layout) for track in tracks]
        for first in range(0, len(panels), layout.num_columns):
            table.add_row(*panels[first : first + layout.num_columns])
        num_tokens = sum(track.num_tokens for track in tracks)
        num_running = sum(track.first_token_s is not None and track.ended_s is None for track in tracks)
        return Group(table, Text(f"{num_running} running, {num_tokens} tokens so far", style="dim"))

    def _panel(self, track: Track, layout: Layout) -> Panel:
        """The newest lines of a request; lines are as wide as their characters' cells, not as many characters."""
        text = Text.assemble((track.prompt.shown, "dim"), track.text.rstrip())
        lines = text.wrap(self._console, layout.panel_width - _BORDER_CELLS)
        shown = Text("\n").join(lines[-(layout.panel_height - _BORDER_LINES) :])
        mark, style = _look(track)
        return Panel(
            shown,
            title=Text.assemble((f"{mark} ", style), (track.prompt.title, "bold"), (_priority_mark(track), "dim")),
            title_align="left",
            subtitle=Text(describe(track), style="dim"),
            subtitle_align="right",
            border_style=style,
            height=layout.panel_height,
        )


def describe(track: Track) -> str:
    """Where a request stands, in a few words."""
    if track.num_tokens:
        ended = f"{track.reason}, " if track.reason is not None else ""
        return f"{ended}{track.num_tokens} token{'' if track.num_tokens == 1 else 's'}"
    return "to come" if track.sent_s is None else "queued" if track.started_s is None else "begun"


def _priority_mark(track: Track) -> str:
    return "" if track.prompt.priority == "normal" else f" [{track.prompt.priority}]"


def total_rows(numbers: Totals) -> list[tuple[str, str]]:
    """The totals as names and sentences."""
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
    if numbers.tokens_per_step is not None:
        rows.append(("batch", f"{numbers.tokens_per_step:.1f} sequences gave a token in a step, on average"))
    share = numbers.cached_tokens / numbers.prompt_tokens if numbers.prompt_tokens else 0.0
    rows.append(
        (
            "prefix cache",
            f"{numbers.cached_tokens} of {numbers.prompt_tokens} prompt tokens not computed again ({share:.0%})",
        )
    )
    return rows


def _look(track: Track) -> tuple[str, str]:
    """A mark and a colour."""
    if track.problem and track.ended_s is not None:
        return "✗", "red"
    if track.reason == "cancelled":
        return "■", "yellow"
    if track.ended_s is not None:
        return "✓", "green"
    return ("▶", "cyan") if track.first_token_s is not None else ("·", "white")
