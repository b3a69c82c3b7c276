"""Flags that are environment variables too: `--max-num-seqs` is `HEADRACE_MAX_NUM_SEQS`. A flag wins over its variable.

A settings class has one field per flag, annotated with a `Flag` that says what it does and what is allowed. From these
come the command line, the one-line errors and the tables of docs/operations.md, so that they cannot differ.
"""

from __future__ import annotations

import difflib
import os
import types
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from ..clients.address import redact, redact_address
from ..clients.errors import ConfigError
from .exit_codes import UsageError
from .units import format_duration, format_size

ENV_PREFIX = "HEADRACE_"
PANELS = ("Options", "Server", "Engine", "Worker", "Job", "Output")  # their order in --help and in the documentation


@dataclass(frozen=True, slots=True)
class Flag:
    """What the command line and the documentation say of one field."""

    help: str  # one sentence
    allowed: str  # completes "must be …"; also the metavar's explanation in the documentation
    metavar: str | None = None  # None: made of the type
    panel: str = "Options"  # heading in --help
    name: str | None = None  # None: the field's name with dashes
    default: str | None = None  # what the documentation gives as default; None: the field's own


@dataclass(frozen=True, slots=True)
class FlagInfo:
    """A field of a settings class as the command line sees it."""

    field: str  # name in the settings class
    option: str  # `--max-num-seqs`
    variable: str  # `HEADRACE_MAX_NUM_SEQS`
    flag: Flag
    is_bool: bool
    is_list: bool
    metavar: str
    default: str  # as a person would write it; empty without one

    @property
    def declaration(self) -> str:
        """The option as typer declares it; a switch that is on by default gets its `--no-` form, others too."""
        return f"{self.option}/--no-{self.option.removeprefix('--')}" if self.is_bool else self.option


class FlagSettings(BaseSettings):
    """Base of the settings classes. Variables set to nothing count as not set, as compose files leave them."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, populate_by_name=True
    )


SettingsT = TypeVar("SettingsT", bound=FlagSettings)


def flags_of(settings_type: type[FlagSettings]) -> Iterator[FlagInfo]:
    """The flags of a settings class, panel by panel. Raises TypeError for a field without a `Flag`."""
    return iter(sorted(_flags_as_declared(settings_type), key=lambda each: PANELS.index(each.flag.panel)))


def _flags_as_declared(settings_type: type[FlagSettings]) -> Iterator[FlagInfo]:
    for field, info in settings_type.model_fields.items():
        flag = next((each for each in info.metadata if isinstance(each, Flag)), None)
        if flag is None:
            raise TypeError(f"{settings_type.__name__}.{field} has no Flag")
        kind = _plain_type(info.annotation)
        name = flag.name or field.replace("_", "-")
        yield FlagInfo(
            field=field,
            option=f"--{name}",
            variable=str(info.validation_alias or ENV_PREFIX + field.upper()),
            flag=flag,
            is_bool=kind is bool,
            is_list=get_origin(kind) in (list, tuple),
            metavar=flag.metavar or _metavar(kind),
            default=flag.default
            if flag.default is not None
            else ""
            if info.is_required()
            else _default_text(info.default, flag),
        )


def load_settings(settings_type: type[SettingsT], given: Mapping[str, object]) -> SettingsT:
    """Settings from what was given on the command line (None: not given), then the environment, then the defaults.

    Raises UsageError with one line that names the flag and the variable, the value and what is allowed.
    """
    flags = list(flags_of(settings_type))
    try:
        return settings_type(**{field: value for field, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = str(first["loc"][0]) if first["loc"] else ""
        flag = next((each for each in flags if where in (each.field, each.variable)), None)
        if flag is None:  # a rule over several fields speaks for itself
            raise UsageError(first["msg"].removeprefix("Value error, ")) from None
        raise UsageError(_complaint(flag, first, is_given=given.get(flag.field) is not None)) from None


def _complaint(flag: FlagInfo, error: Mapping[str, Any], *, is_given: bool) -> str:
    if error["type"] == "missing":
        return f"{flag.option} (or {flag.variable}) is missing: {flag.flag.allowed}"
    place = flag.option if is_given else f"{flag.variable} (flag {flag.option})"
    value: object = error["input"]
    shown = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    shown = (redact_address if flag.flag.metavar == "URL" else redact)(shown)
    if isinstance(cause := error.get("ctx", {}).get("error"), ConfigError):
        return f"{place} is {shown!r}: {cause}"  # the form is right, what it names is not
    return f"{place} is {shown!r}: must be {flag.flag.allowed}"


def refuse_misspelt_variables(known: Set[str]) -> None:
    """Raise UsageError if a variable only nearly has a known name: it would be ignored in silence."""
    for name in sorted(os.environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            if near:
                raise UsageError(f"{name} is no variable of Headrace; did you mean {near[0]}?")


def _plain_type(annotation: Any) -> Any:
    """The type without `| None` and without what is said of it in `Annotated`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return _plain_type(next(each for each in get_args(annotation) if each is not type(None)))
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(str(each) for each in get_args(kind))
    return {int: "N", float: "X", bool: "", str: "TEXT"}.get(kind, "VALUE")


def _default_text(default: object, flag: Flag) -> str:
    if flag.default is not None:
        return flag.default
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if flag.metavar == "DURATION" and isinstance(default, (int, float)):
        return format_duration(default)
    if flag.metavar == "SIZE" and isinstance(default, int):
        return format_size(default)
    return str(default)
