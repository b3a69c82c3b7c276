"""Commands that go out together, each with what is to be done about its outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cluster import AnyLink
from .connection import Failed
from .lua import Args

Handler = Callable[[Any], None]  # takes a reply, or `Failed`


class Batch:
    """One pipeline. Handlers run in the order of the commands, after all replies are in."""

    def __init__(self) -> None:
        self._commands: list[Args] = []
        self._handlers: list[Handler] = []

    def __len__(self) -> int:
        """Number of commands."""
        return len(self._commands)

    def add(self, command: Args, handler: Handler) -> None:
        """Add one command."""
        self._commands.append(command)
        self._handlers.append(handler)

    def send(self, link: AnyLink) -> None:
        """Send all commands; `finish` must follow."""
        link.start(self._commands)

    def finish(self, link: AnyLink) -> set[str]:
        """Read all replies and handle all outcomes. Returns the codes of those that failed."""
        outcomes = link.finish(len(self._commands))
        for handler, outcome in zip(self._handlers, outcomes, strict=True):
            handler(outcome)
        return {outcome.code for outcome in outcomes if isinstance(outcome, Failed)}
