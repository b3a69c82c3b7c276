"""Commands that go out together, each with what is to be done about its outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .cluster import AnyLink
from .connection import Failed
from .lua import Command

Handler = Callable[[Any], None]  # takes a reply, or `Failed`; of a run, the list of them


class Batch:
    """One pipeline. Handlers run in the order of the commands, after all replies are in."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._handlers: list[tuple[Handler, int]] = []  # with the length of its run; 0 for a single command

    def __len__(self) -> int:
        """Number of commands."""
        return len(self._commands)

    def add(self, command: Command, handler: Handler) -> None:
        """Add one command."""
        self._commands.append(command)
        self._handlers.append((handler, 0))

    def add_run(self, commands: Sequence[Command], handler: Callable[[list[Any]], None]) -> None:
        """Add commands of one kind, whose outcomes are handled together: a step has hundreds of them."""
        if commands:
            self._commands += commands
            self._handlers.append((handler, len(commands)))

    def send(self, link: AnyLink) -> None:
        """Send all commands; `finish` must follow."""
        link.start(self._commands)

    def finish(self, link: AnyLink) -> dict[str, str]:
        """Read all replies and handle all outcomes. Returns the codes of those that failed, with a message of each."""
        outcomes = link.finish(len(self._commands))
        if len(outcomes) != len(self._commands):
            raise RuntimeError(f"{len(outcomes)} outcomes for {len(self._commands)} commands")
        first = 0
        for handler, length in self._handlers:
            handler(outcomes[first : first + length] if length else outcomes[first])
            first += length or 1
        return {outcome.code: outcome.message for outcome in outcomes if isinstance(outcome, Failed)}
