"""Log lines and counters. A line about a request carries its id; none carries a prompt, an answer or a password."""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import dataclass, fields
from typing import Protocol

import structlog

_TO_QUOTE = re.compile(r'[\s"=\\\x00-\x1f\x7f]')


class Log(Protocol):
    """The part of a structlog logger that is used here."""

    def info(self, event: str, **fields: object) -> None:
        """Something worth knowing."""

    def warning(self, event: str, **fields: object) -> None:
        """Something that should not be, and was dealt with."""

    def error(self, event: str, **fields: object) -> None:
        """Something that a person should look at."""


@dataclass(slots=True)
class Counters:
    """What has happened since the start. Written by the step loop alone; others may read it at any time."""

    taken: int = 0  # entries that came in as new
    attempts: int = 0  # attempts begun
    finished: int = 0  # terminal entries known to be in
    acknowledged: int = 0  # acknowledgements that went through
    refused: int = 0  # requests ended without being run
    cancelled: int = 0
    deadlines: int = 0
    fenced: int = 0  # attempts that another has overtaken
    lost_leases: int = 0
    gone: int = 0  # streams that vanished under an attempt
    broken: int = 0  # attempts dropped for an error that does not pass
    recovered: int = 0  # abandoned entries claimed
    lost_replies: int = 0  # own pending entries that memory did not know
    duplicates: int = 0
    dead_lettered: int = 0
    handed_back: int = 0
    resent: int = 0  # entries sent more than once
    reconnects: int = 0
    out_of_memory: int = 0  # exchanges in which the server was out of memory
    engine_errors: int = 0
    tokens: int = 0  # tokens published

    def snapshot(self) -> dict[str, int]:
        """All counters by name."""
        return {each.name: int(getattr(self, each.name)) for each in fields(self)}


def render(_logger: object, _method: str, event: structlog.typing.EventDict) -> str:
    """One line of `key=value` pairs, the last step of structlog's; quoted as JSON where a value could end early.

    structlog's own takes ten times as long, and there are two lines a request.
    """
    first = {key: event.pop(key, None) for key in ("timestamp", "level", "event")}
    return " ".join([f"{key}={_shown(value)}" for key, value in (*first.items(), *event.items())])


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if _TO_QUOTE.search(text) else text


def make_log() -> Log:
    """A logger that writes one line of `key=value` pairs per event to standard error, on a terminal in colour.

    Wrapped by itself, not configured for the whole process: a program that embeds a worker keeps its own logging.
    """
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if sys.stderr.isatty():
        processors.append(structlog.dev.ConsoleRenderer())
    else:
        processors.append(render)
    logger: Log = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    return logger
