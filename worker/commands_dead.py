"""`headrace dead ls`, `show`, `retry` and `purge`: the jobs that were given up."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ..clients.errors import InvalidJobError, PayloadError
from ..clients.keys import Keys
from ..clients.link import Link
from ..clients.payload import unpack
from .command import command
from .dead import DeadEntry, DeadLetters, Reviver, explained, why_not
from .exit_codes import CommandError, ExitCode, UsageError
from .reach import connected
from .settings_client import DeadLsFlags, DeadPurgeFlags, DeadRetryFlags, DeadShowFlags
from .settings_server import ServerFlags
from .table import printable, table
from .units import format_duration

_SHOWN_ALWAYS = (b"id", b"v", b"fp")  # of a job's own fields; the others may hold a prompt
_MAX_CELL_LEN = 128
EntryArgument = Annotated[str, typer.Argument(metavar="ENTRY_ID", help="id of the dead entry, as ls prints it")]
EntriesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[ENTRY_ID…]", help="ids of dead entries, as ls prints them")
]


@command(DeadLsFlags)
def ls(settings: DeadLsFlags) -> ExitCode:
    """List the jobs that were given up, the newest first."""
    with _letters(settings) as letters:
        if settings.as_json:
            for entry in letters.newest(settings.limit):
                sys.stdout.write(_line(_head(entry)))
            return ExitCode.OK
        rows = [("ENTRY", "REQUEST", "REASON", "ATTEMPTS", "WHEN", "FROM")]
        rows += [_row(entry) for entry in letters.newest(settings.limit)]
        num_more = len(letters) - (len(rows) - 1)
    sys.stdout.write(table(rows) if len(rows) > 1 else "no dead job\n")
    if num_more > 0:
        sys.stdout.write(f"and {num_more} more: --limit\n")
    return ExitCode.OK


@command(DeadShowFlags)
def show(settings: DeadShowFlags, entry_id: EntryArgument) -> ExitCode:
    """Show one dead entry, without its payload unless that is asked for."""
    with _letters(settings) as letters:
        entry = letters.find(entry_id)
    reason = why_not(entry, _keys(settings))
    fields = [_field(name, value, with_payload=settings.with_payload) for name, value in entry.fields]
    if settings.as_json:
        sys.stdout.write(_line({**_head(entry), "retryable": reason is None, "why_not": reason, "fields": fields}))
        return ExitCode.OK
    rows = [(name, printable(str(value))) for name, value in _head(entry).items() if value is not None]
    rows.append(("retryable", "yes" if reason is None else f"no: {printable(reason)}"))
    rows += [(f"job's {printable(each['name'])}", _field_text(each)) for each in fields]
    sys.stdout.write(table(rows))
    return ExitCode.OK


@command(DeadRetryFlags)
def retry(settings: DeadRetryFlags, entry_ids: EntriesArgument = None) -> ExitCode:
    """Send dead jobs again, each as a new request; an entry goes once its job is in the queue."""
    ids = _chosen(entry_ids, is_all=settings.all)
    if settings.id is not None and len(ids) != 1:
        raise UsageError("--id names one request: give one ENTRY_ID with it")
    keys = _keys(settings)
    with _letters(settings) as letters, closing(Link.to(settings.url())) as link:
        reviver = Reviver(letters, link, keys)
        if settings.all:
            return _retry_all(letters, reviver, settings)
        entries = [letters.find(each) for each in ids]
        for entry in entries:  # before anything is sent
            reason = why_not(entry, keys)
            if reason is not None:
                raise CommandError(f"dead entry {entry.entry_id} holds no job to retry: {reason}", ExitCode.REFUSED)
        for entry in entries:
            _tell(entry, reviver.retry(entry, settings.id), as_json=settings.as_json)
    return ExitCode.OK


@command(DeadPurgeFlags)
def purge(settings: DeadPurgeFlags, entry_ids: EntriesArgument = None) -> ExitCode:
    """Throw dead entries away, for good."""
    ids = _chosen(entry_ids, is_all=settings.all)
    if settings.older_than is not None and not settings.all:
        raise UsageError("--older-than goes with --all")
    with _letters(settings) as letters:
        if not settings.all:
            found = [letters.find(each).entry_id for each in ids]
            _confirm(settings, f"{_entries(len(found))} of queue {settings.queue}")
            num_gone = letters.remove(*found)
        else:
            age = "" if settings.older_than is None else f" older than {format_duration(settings.older_than)}"
            bound = letters.bound(settings.older_than)
            _confirm(settings, f"all dead entries of queue {settings.queue}{age}")
            num_gone = 0 if bound is None else letters.remove_below(bound)
    sys.stdout.write(f"purged: {num_gone}\n")
    return ExitCode.OK


def _show_help(context: typer.Context) -> None:
    """Say which commands there are, where none is named."""
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


def _group() -> typer.Typer:
    group = typer.Typer(add_completion=False, rich_markup_mode=None)
    group.callback(invoke_without_command=True)(_show_help)
    for name, function in (("ls", ls), ("show", show), ("retry", retry), ("purge", purge)):
        group.command(name)(function)
    return group


def _keys(settings: ServerFlags) -> Keys:
    return Keys(settings.prefix, settings.queue)


@contextmanager
def _letters(settings: ServerFlags) -> Generator[DeadLetters]:
    with connected(settings) as client:
        yield DeadLetters(client, _keys(settings))


def _chosen(entry_ids: list[str] | None, *, is_all: bool) -> list[str]:
    """The entries that the command line names, each once; none with --all."""
    if bool(entry_ids) == is_all:
        raise UsageError("give either ENTRY_IDs or --all")
    return list(dict.fromkeys(entry_ids or ()))


def _retry_all(letters: DeadLetters, reviver: Reviver, settings: DeadRetryFlags) -> ExitCode:
    """Retry what can be; what cannot stays, and is told at the end in one line."""
    kept: list[str] = []
    for entry in letters.all_of_now():
        try:
            _tell(entry, reviver.retry(entry), as_json=settings.as_json)
        except InvalidJobError as error:
            kept.append(f"{entry.entry_id}: {explained(error)}")
    if kept:
        message = f"{_entries(len(kept))} without a job to retry left; the first is {kept[0]}"
        raise CommandError(message, ExitCode.REFUSED)
    return ExitCode.OK


def _confirm(settings: DeadPurgeFlags, what: str) -> None:
    """Raises UsageError where nobody can be asked, typer.Abort for a no."""
    if settings.yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"to purge {what} without being asked, give --yes")
    typer.confirm(f"Purge {what}?", abort=True, err=True)


def _entries(count: int) -> str:
    return "1 dead entry" if count == 1 else f"{count} dead entries"


def _tell(entry: DeadEntry, new_id: str, *, as_json: bool) -> None:
    document = {"entry": entry.entry_id, "was": entry.request_id, "id": new_id}
    sys.stdout.write(_line(document) if as_json else f"{entry.entry_id} {new_id}\n")
    sys.stdout.flush()


def _head(entry: DeadEntry) -> dict[str, Any]:
    attempts = entry.told.get("attempts", "")
    return {
        "entry": entry.entry_id,
        "request": entry.request_id[:_MAX_CELL_LEN],
        "reason": entry.told.get("reason"),
        "error": entry.told.get("error"),
        "attempts": int(attempts) if attempts.isdecimal() else None,
        "worker": entry.told.get("worker"),
        "from": entry.told.get("from"),
        "when": _when(entry),
    }


def _row(entry: DeadEntry) -> tuple[str, ...]:
    head = _head(entry)
    values = (head[name] for name in ("entry", "request", "reason", "attempts", "when", "from"))
    return tuple("-" if value in (None, "") else printable(str(value)) for value in values)


def _when(entry: DeadEntry) -> str | None:
    try:
        return datetime.fromtimestamp(entry.at_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None  # an id of somebody's own, no time of this world


def _field(name: bytes, value: bytes, *, with_payload: bool) -> dict[str, Any]:
    """A field of the job: its size, and what it holds where that is no secret or asked for."""
    shown: dict[str, Any] = {"name": name.decode("utf-8", "backslashreplace"), "bytes": len(value)}
    if with_payload or (name in _SHOWN_ALWAYS and len(value) <= _MAX_CELL_LEN):
        shown["value"] = _value(name, value)
    return shown


def _value(name: bytes, value: bytes) -> Any:
    if name in (b"job", b"json"):
        try:
            kind = "json" if name == b"json" else "d"
            return unpack(value, kind, max_bytes=len(value), int_keys=frozenset({"logit_bias"}))
        except PayloadError:
            pass  # shown as it is: that is what was asked for
    return value.decode("utf-8", "backslashreplace")


def _field_text(field: dict[str, Any]) -> str:
    if "value" not in field:
        return f"{field['bytes']} bytes"
    value = field["value"]
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _line(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


dead = _group()
