"""Draws plots into PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .sections import Plot

_INCHES = (6.4, 3.8)
_DPI = 110
_COLOURS = ("#1f6f8b", "#d1495b", "#8d8d8d", "#edae49")


def draw(plot: Plot, folder: Path) -> str:
    """Write one picture; give its file name."""
    import matplotlib

    any_matplotlib: Any = matplotlib
    any_matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    any_pyplot: Any = pyplot
    figure, axes = any_pyplot.subplots(figsize=_INCHES, layout="constrained")
    for line, colour in zip(plot.lines, _COLOURS, strict=False):
        if plot.bars:
            axes.barh(line.x, line.y, color=colour)
            axes.set_yticks(line.x, plot.ticks)
            axes.invert_yaxis()
        else:
            few = len(line.x) <= 20
            axes.plot(line.x, line.y, marker="o" if few else "", color=colour, label=line.label, linewidth=1.4)
    if plot.bars:
        axes.set_xlabel(plot.y_label)
    else:
        axes.set(xlabel=plot.x_label, ylabel=plot.y_label)
        axes.set_xscale("log", base=2) if plot.log_x else None
        axes.set_yscale("log") if plot.log_y else axes.set_ylim(bottom=0)
        if len(plot.lines) > 1:
            axes.legend(frameon=False)
    axes.set_title(plot.title, fontsize=11)
    axes.set_axisbelow(True)
    axes.grid(visible=True, alpha=0.25)
    name = f"{plot.name}.png"
    figure.savefig(folder / name, dpi=_DPI, metadata={"Software": None})
    any_pyplot.close(figure)
    return name
