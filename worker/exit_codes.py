"""How a command ends: the exit codes, and the errors that carry one to the command line.

WorkerError (errors)
└── CommandError                 a clear line for the user and an exit code; printed without a traceback
    ├── UsageError               a flag, variable or argument that cannot be
    ├── MissingExtraError        needs `pip install 'headrace[worker]'`
    └── EmbeddedServerError      the embedded server does not start (embedded)
"""

from __future__ import annotations

from enum import IntEnum

from .errors import WorkerError


class ExitCode(IntEnum):
    """Exit codes of the command `headrace`. The table of docs/operations.md says the same; a test holds them equal."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    SERVER_UNAVAILABLE = 3
    SERVER_UNSUITABLE = 4
    MODEL = 5
    UNSUPPORTED = 6
    MISSING_EXTRA = 7
    EMBEDDED_SERVER = 8
    REQUEST_FAILED = 10
    REQUEST_CANCELLED = 11
    NO_ANSWER = 12
    REFUSED = 13
    UNHEALTHY = 14
    DEMO_FAILED = 15
    WARNINGS_FOUND = 16
    ERRORS_FOUND = 17
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143

    @property
    def meaning(self) -> str:
        """One line for the table in the documentation."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.OK: "all went as asked; for `worker`: drained, or `--burst` and `--check` done",
    ExitCode.INTERNAL: "an error of Headrace itself, with a traceback: please report it; or the output's disk is full",
    ExitCode.USAGE: "a flag, variable or argument that cannot be; the line names it and what is allowed",
    ExitCode.SERVER_UNAVAILABLE: "no Redis or Valkey answers at the URL, or it refuses the password",
    ExitCode.SERVER_UNSUITABLE: "the server would lose data or is too old: an eviction policy other than `noeviction`",
    ExitCode.MODEL: "the model's folder or files are missing or cannot be loaded",
    ExitCode.UNSUPPORTED: "asked for by name, but not built yet, or not on this machine",
    ExitCode.MISSING_EXTRA: "the command needs `pip install 'headrace[worker]'`",
    ExitCode.EMBEDDED_SERVER: "the embedded server did not start",
    ExitCode.REQUEST_FAILED: "the request ended with an error",
    ExitCode.REQUEST_CANCELLED: "the request was cancelled",
    ExitCode.NO_ANSWER: "nothing came within `--timeout`, or the request is unknown or has expired",
    ExitCode.REFUSED: "the job was not taken: invalid, the id names another request, or the queue is full",
    ExitCode.UNHEALTHY: "`health`: no worker consumes, or it makes no progress",
    ExitCode.DEMO_FAILED: "`demo`: a request did not end as it should",
    ExitCode.WARNINGS_FOUND: "`doctor`: found something to look at, and no error",
    ExitCode.ERRORS_FOUND: "`doctor`: found an error: jobs are not served, may be lost, or are answered wrongly",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C (128 + SIGINT)",
    ExitCode.BROKEN_PIPE: "whoever read the output went away (128 + SIGPIPE)",
    ExitCode.TERMINATED: "ended by SIGTERM before a worker began to serve (128 + SIGTERM)",
}


class CommandError(WorkerError):
    """An expected failure: `message` is one line for the user, `code` how the command ends."""

    code = ExitCode.INTERNAL

    def __init__(self, message: str, code: ExitCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code


class UsageError(CommandError):
    """A flag, variable or argument that cannot be."""

    code = ExitCode.USAGE


class MissingExtraError(CommandError):
    """A package of the extra `worker` is not installed."""

    code = ExitCode.MISSING_EXTRA

    def __init__(self, module: str) -> None:
        super().__init__(
            f"this command needs more than the client ({module} is missing): pip install 'headrace[worker]'"
        )
        self.module = module
