"""The report: Markdown with tables and plots, from the JSON that each benchmark has left.

    python -m benchmarks.report FOLDER        # write FOLDER/report.md anew

A folder holds one JSON file a benchmark, so that running one of them again replaces its part and keeps the others.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .machine import Machine
from .plots import draw
from .sections import Cell, Claim, Section, Table, from_json, to_json

REPORT = "report.md"


@dataclass(frozen=True, slots=True)
class Record:
    """One benchmark's result as it is kept."""

    section: Section
    machine: Machine
    date: str
    quick: bool
    missing: tuple[str, ...]  # a sentence for each peer that was not there


def save(record: Record, folder: Path) -> Path:
    """Keep a result; one of the same name is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.section.name}.json"
    kept = {**dataclasses.asdict(record), "section": to_json(record.section)}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return path


def load(folder: Path, order: Sequence[str] = ()) -> list[Record]:
    """All results of a folder: those named in `order` first, the others by name."""
    records: list[Record] = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        records.append(
            Record(
                section=from_json(found["section"]),
                machine=Machine(**found["machine"]),
                date=found["date"],
                quick=found["quick"],
                missing=tuple(found["missing"]),
            )
        )
    names = list(order)
    return sorted(
        records, key=lambda each: names.index(each.section.name) if each.section.name in names else len(names)
    )


def write(folder: Path, order: Sequence[str] = ()) -> Path:
    """Render the folder's results. Raises ValueError if there are none."""
    records = load(folder, order)
    if not records:
        raise ValueError(f"no results in {folder}")
    path = folder / REPORT
    path.write_text(render(records, folder))
    return path


def render(
    records: Sequence[Record], folder: Path, title: str = "Benchmarks", intro: Sequence[str] = (), kept: str = ""
) -> str:
    """The report's text, with sentences before everything; pictures are drawn into `folder`.

    kept  the file that holds the figures, where it is one for all
    """
    newest = max(records, key=lambda each: each.date)
    said = [f"{sentence}." for sentence in intro]
    parts = [f"# {title}", *said, _machine(newest), _claims(records)]
    if any(each.quick for each in records):
        parts.insert(1, "**A quick run: it shows that everything works. Its figures say nothing.**")
    missing = dict.fromkeys(sentence for each in records for sentence in each.missing)
    parts += [f"{sentence}." for sentence in missing]
    for record in records:
        parts.append(_section(record, folder, kept or f"{record.section.name}.json"))
    return "\n\n".join(parts) + "\n"


def _machine(record: Record) -> str:
    machine = record.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    rows = (
        ("CPU", f"{machine.cpu}, {machine.cores} cores"),
        ("memory", f"{machine.memory_gib:g} GiB"),
        ("system", machine.system),
        ("compiler", machine.compiler or "none"),
        ("versions", versions),
        ("load before", f"{machine.load:g}"),
    )
    return markdown(Table("", ("machine", ""), rows))


def _claims(records: Sequence[Record]) -> str:
    rows = tuple(
        (record.section.name, claim.what, _value(claim), _limit(claim), _verdict(claim))
        for record in records
        for claim in record.section.claims
    )
    return "## Targets\n\n" + markdown(Table("", ("", "what", "measured", "target", ""), rows))


def _value(claim: Claim) -> str:
    return claim.note or "not measured" if claim.value is None else f"{_number(claim.value)} {claim.unit}".strip()


def _limit(claim: Claim) -> str:
    return f"{'≤' if claim.at_most else '≥'} {_number(claim.limit)}"


def _verdict(claim: Claim) -> str:
    return {True: "met", False: "**not met**", None: "–"}[claim.met]


def _section(record: Record, folder: Path, kept: str) -> str:
    section = record.section
    parts = [f"## {section.title}", section.how]
    parts += [f"**{table.title}**\n\n{markdown(table)}" for table in section.tables]
    parts += [f"{note.rstrip('.')}." for note in section.notes]
    parts += [f"![{plot.title}]({draw(plot, folder)})" for plot in section.plots]
    parts.append(f"<sub>{record.date}, commit {record.machine.commit or 'unknown'}; {kept}</sub>")
    return "\n\n".join(parts)


def markdown(table: Table) -> str:
    """A table in Markdown; its title is left to the caller."""
    lines = [table.columns, tuple("---" for _ in table.columns), *(tuple(map(_cell, row)) for row in table.rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(cell: Cell) -> str:
    if cell is None:
        return "–"
    return _number(cell) if isinstance(cell, float) else str(cell).replace("|", "\\|")


def _number(value: float) -> str:
    """Three figures, without an exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2 if abs(value) < 100 and abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


if __name__ == "__main__":
    from .questions import QUESTIONS

    print(write(Path(sys.argv[1]), list(QUESTIONS)))
