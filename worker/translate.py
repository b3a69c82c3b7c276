"""From the errors of clients, server and installation to one line and an exit code for the command line."""

from __future__ import annotations

import redis

from ..clients import errors as clients
from ..clients.address import redact
from ..engine import errors as engine
from . import errors as worker
from .exit_codes import CommandError, ExitCode, MissingExtraError
from .extra import EXTRA_MODULES

_CODES: tuple[tuple[type[Exception], ExitCode], ...] = (
    (clients.RequestFailedError, ExitCode.REQUEST_FAILED),
    (clients.WaitTimeoutError, ExitCode.NO_ANSWER),
    (clients.ExpiredError, ExitCode.NO_ANSWER),
    (clients.StreamError, ExitCode.REQUEST_FAILED),
    (clients.ConfigError, ExitCode.USAGE),
    (clients.InvalidJobError, ExitCode.REFUSED),
    (clients.ConflictError, ExitCode.REFUSED),
    (clients.QueueFullError, ExitCode.REFUSED),
    (clients.UnavailableError, ExitCode.SERVER_UNAVAILABLE),
    (clients.ServerError, ExitCode.SERVER_UNAVAILABLE),
    (worker.ServerUnsuitableError, ExitCode.SERVER_UNSUITABLE),
    (worker.StartupError, ExitCode.SERVER_UNAVAILABLE),
    (worker.LinkError, ExitCode.SERVER_UNAVAILABLE),
    (engine.UnsupportedModelError, ExitCode.UNSUPPORTED),
    (engine.ModelError, ExitCode.MODEL),
    (redis.RedisError, ExitCode.SERVER_UNAVAILABLE),
)


def translate(error: Exception) -> CommandError | None:
    """The error as the command line shows it, or None if it is none that a user could have caused."""
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        return MissingExtraError(module) if module in EXTRA_MODULES else None
    for kind, code in _CODES:
        if isinstance(error, kind):
            return CommandError(redact(str(error)) or kind.__name__, code)
    return None
