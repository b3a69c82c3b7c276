"""From a settings class to a typer command: one option per flag, one line and an exit code for what goes wrong."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import typer

from .exit_codes import CommandError, ExitCode
from .flags import FlagInfo, FlagSettings, flags_of, load_settings, refuse_misspelt_variables

# Read elsewhere than in a settings class: the folder of compiled kernels.
OTHER_VARIABLES = frozenset({"HEADRACE_CACHE_DIR"})
SettingsT = TypeVar("SettingsT", bound=FlagSettings)


class Command(Protocol):
    """A function that typer can take: its signature has one parameter per option."""

    def __call__(self, **options: object) -> None:
        """Run and raise typer.Exit with the exit code."""
        ...


def command(settings_type: type[SettingsT]) -> Callable[[Callable[..., ExitCode]], Command]:
    """Make a typer command of a function `f(settings, *arguments) -> ExitCode`.

    Its parameters after `settings` are the command's arguments, declared as typer declares them; every flag of
    `settings_type` becomes an option. What the function raises is turned into a CommandError (see `translated`).
    """

    def decorate(function: Callable[..., ExitCode]) -> Command:
        flags = {flag.field: _parameter(flag) for flag in flags_of(settings_type)}
        arguments = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        def run(**given: object) -> None:
            with translated():
                refuse_misspelt_variables(known_variables())
                settings = load_settings(settings_type, {field: _not_given(given.pop(field)) for field in flags})
                code = function(settings, **given)
                sys.stdout.flush()
            raise typer.Exit(code)

        run.__doc__ = function.__doc__
        # typer reads parameters from here
        setattr(run, "__signature__", inspect.Signature([*arguments, *flags.values()]))  # noqa: B010
        run.__annotations__ = {}
        return run

    return decorate


def known_variables() -> frozenset[str]:
    """Every variable that some command or the kernels read."""
    from .settings import SERVING_FLAGS
    from .settings_client import CLIENT_FLAGS

    flags = {flag.variable for kind in (*SERVING_FLAGS, *CLIENT_FLAGS) for flag in flags_of(kind)}
    return frozenset(flags | OTHER_VARIABLES)


@contextmanager
def translated() -> Generator[None]:
    """Turn every error that a user can meet into a CommandError; the rest passes as it is."""
    from .translate import translate

    try:
        yield
    except (CommandError, typer.Exit):
        raise
    except BrokenPipeError:
        # What is still buffered can no longer be written; the interpreter would complain about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CommandError("", ExitCode.BROKEN_PIPE) from None
    except Exception as error:
        known = translate(error)
        if known is None:
            raise
        raise known from error


def _parameter(flag: FlagInfo) -> inspect.Parameter:
    suffix = f" [{flag.default}]" if flag.default else ""
    kind: Any = bool if flag.is_bool else list[str] if flag.is_list else str
    option: Any = typer.Option(
        None,
        flag.declaration,
        help=flag.flag.help + suffix,
        metavar=flag.metavar or None,
        show_default=False,
    )
    return inspect.Parameter(flag.field, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


def _not_given(value: object) -> object:
    return None if value == [] else value
