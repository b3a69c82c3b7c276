"""Errors of the worker's queue side.

WorkerError                 base
├── StartupError            the worker cannot start: one sentence that says what to do
│   ├── ServerUnavailableError  nothing answers at the address, or it refuses the password
│   └── ServerUnsuitableError   the server is too old or would lose data
└── LinkError               a connection cannot be made or was lost (internal to `connection`)
"""

from __future__ import annotations


class WorkerError(Exception):
    """Base of this package's queue-side errors."""


class StartupError(WorkerError):
    """The worker cannot start; the message is one sentence for the person who started it."""


class ServerUnavailableError(StartupError):
    """No server answers, or it does not let this worker in."""


class ServerUnsuitableError(StartupError):
    """The server answers, but is too old or set up such that jobs could be lost."""


class LinkError(WorkerError):
    """A connection cannot be made."""
