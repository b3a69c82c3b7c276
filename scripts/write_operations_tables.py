"""Write the tables of docs/operations.md, which say what the code says: exit codes, and the flags of each command.

Called as `python scripts/write_operations_tables.py`. A test compares, so that the page cannot fall behind.
"""

from __future__ import annotations

import re
from pathlib import Path

from headrace.worker.cli import COMMANDS
from headrace.worker.exit_codes import ExitCode
from headrace.worker.flags import FlagSettings, flags_of
from headrace.worker.settings import SERVING_FLAGS
from headrace.worker.settings_client import CLIENT_FLAGS
from headrace.worker.settings_server import ServerFlags

PAGE = Path(__file__).resolve().parents[1] / "docs" / "operations.md"


def render(page: str) -> str:
    """The page with each table between `<!-- begin NAME -->` and `<!-- end NAME -->` written anew."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin {name} -->\n{tables()[name]}<!-- end {name} -->"

    return re.sub(r"<!-- begin (.+?) -->\n.*?<!-- end \1 -->", fill, page, flags=re.DOTALL)


def tables() -> dict[str, str]:
    """Every table by name."""
    kinds = {kind.__name__.removesuffix("Flags").lower(): kind for kind in (*SERVING_FLAGS, *CLIENT_FLAGS)}
    names = [" ".join(words) for entry in COMMANDS for words in _names(entry.name, entry.commands)]
    flag_tables = {
        f"flags of {name}": _flag_table(kinds[name.replace(" ", "")], shared=name not in ("worker", "demo"))
        for name in names
        if name.replace(" ", "") in kinds
    }
    return {
        "exit codes": _exit_code_table(),
        "commands": _command_table(),
        "flags of every command": _flag_table(ServerFlags, shared=False),
        **flag_tables,
    }


def _names(name: str, commands: tuple[str, ...]) -> list[tuple[str, ...]]:
    """A command as it is typed; a group's commands."""
    return [(name, each) for each in commands] or [(name,)]


def _exit_code_table() -> str:
    rows = "".join(f"| {code.value} | {code.name} | {code.meaning} |\n" for code in ExitCode)
    return "| code | name | meaning |\n|---|---|---|\n" + rows


def _command_table() -> str:
    rows = "".join(f"| `headrace {entry.name}` | {entry.help} |\n" for entry in COMMANDS)
    return "| command | what it does |\n|---|---|\n" + rows


def _flag_table(kind: type[FlagSettings], *, shared: bool) -> str:
    """One row per flag; with `shared` without those that every command has."""
    skipped = set(ServerFlags.model_fields) if shared else set[str]()
    rows = ""
    for flag in flags_of(kind):
        if flag.field not in skipped:
            option = "<br>".join(f"`{part}`" for part in flag.declaration.split("/"))
            metavar = "" if "|" in flag.metavar else f" {flag.metavar}".rstrip()
            cells = (f"{option}{metavar}", f"`{flag.variable}`", flag.flag.help, flag.flag.allowed, flag.default or "–")
            rows += "| " + " | ".join(cells) + " |\n"
    if not rows:
        return "None but those of every command.\n"
    return "| flag | variable | what | must be | default |\n|---|---|---|---|---|\n" + rows


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
