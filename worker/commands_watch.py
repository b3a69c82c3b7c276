"""`headrace status`, `health` and `version`: look, and change nothing."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

import typer

from ..clients.keys import Keys
from .command import command
from .exit_codes import ExitCode
from .reach import connected
from .settings_client import HealthFlags, StatusFlags
from .settings_server import ServerFlags
from .status import QueueStatus, WorkerStatus, read_status
from .table import table

# Of a worker's hash, in this order: heading, field.
_COLUMNS = (
    ("MODEL", "model"),
    ("HOST", "host"),
    ("PID", "pid"),
    ("RUNNING", "running"),
    ("WAITING", "waiting"),
    ("KV FREE", "free_kv_blocks"),
    ("TOKENS/S", "tokens_per_s"),
)


@command(StatusFlags)
def status(settings: StatusFlags) -> ExitCode:
    """Show the workers of a queue, what waits, runs and has been given up."""
    state = _read(settings)
    sys.stdout.write(_as_json(state) if settings.as_json else _as_text(state))
    return ExitCode.OK


@command(HealthFlags)
def health(settings: HealthFlags) -> ExitCode:
    """Say whether this machine's worker consumes: its sign of life is written only while its step loop moves."""
    state = _read(settings)
    host = None if settings.any_host else socket.gethostname()
    workers = [each for each in state.workers if each.fields and host in (None, each.fields.get("host"))]
    healthy = [each for each in workers if each.is_healthy]
    where = "on any machine" if host is None else f"on {host}"
    if healthy:
        names = ", ".join(f"{each.name} ({each.state})" for each in healthy)
        sys.stdout.write(f"healthy: {names}\n")
        return ExitCode.OK
    found = ", ".join(f"{each.name} ({each.state})" for each in workers) or "none"
    sys.stdout.write(f"unhealthy: no worker of queue {state.queue} makes progress {where}; found: {found}\n")
    return ExitCode.UNHEALTHY


def version() -> None:
    """Show the version."""
    print_version()
    raise typer.Exit(ExitCode.OK)


def print_version() -> None:
    """Write the installed version to stdout."""
    try:
        text = installed_version("headrace")
    except PackageNotFoundError:
        text = "unknown (not installed)"
    sys.stdout.write(f"headrace {text}\n")


def _read(settings: ServerFlags) -> QueueStatus:
    with connected(settings) as client:
        return read_status(client, Keys(settings.prefix, settings.queue))


def _as_json(state: QueueStatus) -> str:
    document: dict[str, Any] = asdict(state)
    for worker, row in zip(state.workers, document["workers"], strict=True):
        row["state"] = worker.state
    return json.dumps(document, ensure_ascii=False) + "\n"


def _as_text(state: QueueStatus) -> str:
    lines = [("QUEUE", "WAITING", "TAKEN", "OLDEST WAITING")]
    for line in state.lines:
        oldest = "-" if line.oldest_waiting_s is None else f"{line.oldest_waiting_s:.1f} s"
        lines.append((f"{state.queue} {line.priority}", str(line.waiting), str(line.taken), oldest))
    lines.append((f"{state.queue} dead", str(state.dead), "-", "-"))
    workers = [("WORKER", "STATE", "JOBS", *(heading for heading, _ in _COLUMNS))]
    workers += [_worker_row(each) for each in state.workers]
    if len(workers) == 1:
        return table(lines) + "\nno worker\n"
    return table(lines) + "\n" + table(workers)


def _worker_row(worker: WorkerStatus) -> tuple[str, ...]:
    values = (worker.fields.get(name, "-") for _, name in _COLUMNS)
    return (worker.name, worker.state, str(worker.pending), *values)
