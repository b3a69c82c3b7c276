"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows as text, each column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = ""
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        text += "  ".join(cells).rstrip() + "\n"
    return text


def printable(text: str) -> str:
    """Text that moves no cursor and rings no bell: names and dead entries may hold anything."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
