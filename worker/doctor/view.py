"""How the doctor's findings look: tables with bars, then one line for each finding; or one JSON object."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..table import printable
from ..units import show_bytes
from .findings import Finding, Severity
from .sample import DEAD, JOBS
from .seen import KeysSeen, KindSeen, NodeSeen, QueueSeen, Seen

_BAR_CELLS: Final = 20
_WIDTH: Final = 200  # cells, where there is no terminal
_STYLES: Final = {Severity.ERROR: "bold red", Severity.WARNING: "yellow"}


def show(seen: Seen | None, findings: Sequence[Finding]) -> None:
    """Write it all to standard output; no colours and no cut lines where that is no terminal."""
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else _WIDTH)
    if seen is not None:
        for table in (_servers(seen.nodes), _queue(seen.keys.queue, seen.queue), _memory(seen.stored)):
            if table is not None:
                console.print(table)
                console.print()
    for finding in findings:
        style = _STYLES[finding.severity]
        line = Text.assemble(
            (f"{finding.severity:8}", style), (finding.check, "bold"), f": {finding.seen} → {finding.do}"
        )
        console.print(line, soft_wrap=True)
    console.print(_summary(findings, seen), soft_wrap=True)
    for what in seen.left_out if seen is not None else ():
        console.print(Text(f"not looked at: {printable(what)}", "dim"), soft_wrap=True)


def as_json(seen: Seen | None, findings: Sequence[Finding]) -> str:
    """The same as one object on one line."""
    document: dict[str, Any] = {"findings": [asdict(each) for each in findings]}
    if seen is not None:
        document |= {
            "servers": [_server_document(node) for node in seen.nodes],
            "queue": _queue_document(seen),
            "keys": {"all": seen.stored.num_all, "looked_at": seen.stored.num_looked},
            "memory": [
                {"kind": kind.kind, "keys": num_keys, "bytes": num_bytes, "measured": kind.num_measured}
                for kind, num_keys, num_bytes in _estimates(seen.stored)
            ],
            "not_looked_at": list(seen.left_out),
        }
    return json.dumps(document, ensure_ascii=False) + "\n"


def _summary(findings: Sequence[Finding], seen: Seen | None) -> Text:
    errors = sum(each.severity is Severity.ERROR for each in findings)
    warnings = len(findings) - errors
    text = (
        f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        if findings
        else "nothing found"
    )
    if seen is None:
        return Text(text)
    looked = f"{seen.stored.num_looked:,} of {seen.stored.num_all:,} keys looked at"
    style = "bold red" if errors else "yellow" if warnings else "green"
    return Text.assemble((text, style), (f"  ({looked})", "dim"))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.strip("<"), justify="left" if column.endswith("<") else "right", no_wrap=True)
    return table


def _servers(nodes: Sequence[NodeSeen]) -> Table | None:
    table = _table("SERVER<", "VERSION<", "MEMORY", "OF", "<", "KEYS", "ROUND TRIP", "CLOCK")
    for node in nodes:
        if node.error:
            table.add_row(node.address, "does not answer")
            continue
        used, limit = node.number("used_memory"), node.number("maxmemory")
        table.add_row(
            node.address,
            _version(node),
            show_bytes(used),
            show_bytes(limit) if limit else "no limit",
            _bar(used / limit if limit else 0.0),
            f"{node.num_keys:,}",
            f"{statistics.median(node.round_trips_s) * 1000:.2f} ms",
            f"{node.clock_ahead_s:+.2f} s",
        )
    return table


def _queue(name: str, queue: QueueSeen | None) -> Table | None:
    if queue is None or not queue.lines:
        return None
    table = _table("QUEUE<", "WAITING", "TAKEN", "OLDEST", "<")
    most = max((line.status.waiting for line in queue.lines), default=0)
    for line in queue.lines:
        waiting = line.status.waiting
        oldest = "-" if line.oldest_s is None else f"{line.oldest_s:.1f} s"
        share = waiting / most if most else 0.0
        table.add_row(f"{name} {line.status.priority}", f"{waiting:,}", f"{line.status.taken:,}", oldest, _bar(share))
    table.add_row(f"{name} dead", f"{queue.num_dead:,}", "-", "-", "")
    states: dict[str, int] = {}
    for worker in queue.workers:
        states[worker.state] = states.get(worker.state, 0) + 1
    told = ", ".join(f"{count} {printable(state)}" for state, count in sorted(states.items()))
    table.add_row("workers", told or "none", "", "", "")
    return table


def _memory(stored: KeysSeen) -> Table | None:
    rows = _estimates(stored)
    if not any(num_keys for _, num_keys, _ in rows):
        return None
    table = _table("MEMORY<", "KEYS", "EACH", "ALL", "<")
    whole = sum(num_bytes for *_, num_bytes in rows) or 1
    about = "" if stored.is_complete else "≈ "
    for kind, num_keys, num_bytes in rows:
        if num_keys:
            shown = (show_bytes(kind.mean_bytes), show_bytes(num_bytes)) if kind.num_measured else ("?", "?")
            table.add_row(kind.kind, f"{about}{num_keys:,}", *shown, _bar(num_bytes / whole))
    return table


def _estimates(stored: KeysSeen) -> list[tuple[KindSeen, int, int]]:
    """Each kind with how many keys of it there are and what they take, by what was seen of them."""
    factor = stored.num_all / stored.num_looked if stored.num_looked else 1.0
    rows: list[tuple[KindSeen, int, int]] = []
    for kind in stored.kinds:
        # The queue's own streams were all looked at.
        num_keys = kind.num_keys if kind.kind in {JOBS, DEAD} else round(kind.num_keys * factor)
        rows.append((kind, num_keys, round(num_keys * kind.mean_bytes)))
    return rows


def _server_document(node: NodeSeen) -> dict[str, Any]:
    if node.error:
        return {"address": node.address, "error": node.error}
    return {
        "address": node.address,
        "version": _version(node),
        "used_bytes": node.number("used_memory"),
        "maxmemory_bytes": node.number("maxmemory"),
        "keys": node.num_keys,
        "round_trips_ms": [round(each * 1000, 3) for each in node.round_trips_s],
        "clock_ahead_s": round(node.clock_ahead_s, 3),
    }


def _queue_document(seen: Seen) -> dict[str, Any] | None:
    if seen.queue is None:
        return None
    return {
        "queue": seen.keys.queue,
        "lease_s": seen.lease_s,
        "lines": [{**asdict(line.status), "oldest_s": line.oldest_s} for line in seen.queue.lines],
        "dead": seen.queue.num_dead,
        "workers": [{"name": each.name, "state": each.state, "pending": each.pending} for each in seen.queue.workers],
    }


def _version(node: NodeSeen) -> str:
    valkey = node.info.get("valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {node.info.get('redis_version', '?')}"


def _bar(share: float) -> Text:
    cells = min(_BAR_CELLS, round(share * _BAR_CELLS))
    return Text("█" * cells, "cyan") + Text("░" * (_BAR_CELLS - cells), "dim")
