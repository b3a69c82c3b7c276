"""The command `headrace`.

Only the module of the command that was asked for is imported, and that imports torch, transformers and the like where
it needs them: `headrace --help` answers at once, and a plain `pip install headrace` has all but `worker` and `demo`.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import typer

from .exit_codes import CommandError, ExitCode


@dataclass(frozen=True, slots=True)
class _Entry:
    """One command: its function, or its group of commands, stands under its own name in `module`."""

    name: str
    module: str
    help: str
    commands: tuple[str, ...] = ()  # of a group


COMMANDS = (
    _Entry("demo", "commands_worker", "Show it: a server, a worker and several prompts side by side; ends by itself."),
    _Entry("worker", "commands_worker", "Serve a model: take jobs from a queue, write their tokens to streams."),
    _Entry("submit", "commands_request", "Send a prompt and show its text as it comes."),
    _Entry("tail", "commands_request", "Show a request's text, from its beginning or a cursor on."),
    _Entry("cancel", "commands_request", "Cancel a request, queued or running."),
    _Entry("status", "commands_watch", "Show the workers of a queue, what waits, runs and has been given up."),
    _Entry("health", "commands_watch", "Say whether this machine's worker consumes, by the exit code."),
    _Entry("doctor", "commands_doctor", "Look at the server and the queue: what is wrong, and what to do."),
    _Entry(
        "dead",
        "commands_dead",
        "List, show, retry and purge the jobs that have been given up.",
        ("ls", "show", "retry", "purge"),
    ),
    _Entry("version", "commands_watch", "Show the version."),
)
_EPILOG = "Each flag is an environment variable too: --redis-url is HEADRACE_REDIS_URL. The flag wins."
_BEFORE = frozenset({"--version", "--help", "-h", "--"})  # what may stand before the command
# typer's own errors about the command line; the class has no public name, only its subclass has.
_USAGE_ERROR = cast(type[Exception], typer.BadParameter.__bases__[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a code of `ExitCode`."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no emoji shows a question mark, not an error
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def _open_closed_streams() -> None:
    """Give a process that was started without standard streams (`>&-`) ones that lead nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - for the process's life


def run(arguments: Sequence[str]) -> int:
    """Run the command line and give its exit code; every expected failure is one line on stderr."""
    arguments = arguments or ("--help",)
    try:
        code: object = build_app(_wanted(arguments))(args=list(arguments), prog_name="headrace", standalone_mode=False)
        return code if isinstance(code, int) else ExitCode.OK
    except _USAGE_ERROR as error:
        name, message = _wanted(arguments), cast(Any, error).format_message()
        hint = "" if name else " Flags stand behind the command: headrace COMMAND --flag"
        return _fail(f"headrace {name}".strip(), message + hint, ExitCode.USAGE)
    except CommandError as error:
        return _fail(f"headrace {_wanted(arguments)}", error.message, error.code)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _fail(f"headrace {_wanted(arguments)}", "the output cannot be written: no space left", ExitCode.INTERNAL)


def build_app(wanted: str | None) -> typer.Typer:
    """The command line. Only the command `wanted` is more than its name and a line of help (None: all of them are)."""
    app = typer.Typer(
        help="Prompts in and tokens out through Redis streams.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # tables cut the names of long options off at 80 columns
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_options)
    for entry in COMMANDS:
        function = _function(entry) if wanted in (None, entry.name) else _not_loaded
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=entry.name, help=entry.help, short_help=entry.help, epilog=_EPILOG)
        else:
            app.command(entry.name, help=entry.help, short_help=entry.help, epilog=_EPILOG)(function)
    return app


def _show_version(value: bool) -> None:
    if value:
        from .commands_watch import print_version

        print_version()
        raise typer.Exit


def _options(
    version: bool = typer.Option(False, "--version", help="Show the version.", is_eager=True, callback=_show_version),
) -> None:
    """Take what stands before the command."""


def _function(entry: _Entry) -> Callable[..., None] | typer.Typer:
    return getattr(import_module(f".{entry.module}", __package__), entry.name)


def _not_loaded() -> None:
    raise AssertionError("the command that was asked for is always loaded")


def _wanted(arguments: Sequence[str]) -> str:
    """The command's name; empty behind an option that is none, whose value it may be: an address with its password."""
    before = list(takewhile(lambda each: each.startswith("-"), arguments))
    return next(iter(arguments[len(before) :]), "") if _BEFORE.issuperset(before) else ""


def _fail(name: str, message: str, code: ExitCode) -> int:
    """Say it in one line; nothing where there is nothing to say."""
    if message:
        line = " ".join(message.split())
        try:
            sys.stderr.write(f"{name}: {line}\n")
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return code
