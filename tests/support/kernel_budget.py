"""The table beside the kernels of what each needs: registers of a thread and bytes of shared memory of a program.

    [_decode]
    "Llama-3.1-8B decode bf16" = { sm_80 = [96, 37888], sm_90 = [80, 37888], sm_100 = [80, 37888] }

A line has the largest numbers of all versions of Triton that the gates use.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).resolve().parents[2] / "kernels" / "gpu" / "budget.toml"
HEAD = """\
# What each kernel may need, at most, on each kind of GPU: [registers of a thread, bytes of shared memory of a program].
# Written by `python -m tests.gates --write`, the largest of all versions of Triton; the gates fail on more.
"""


class Need(NamedTuple):
    """Of one kernel in one launch."""

    registers: int
    shared_bytes: int


class Key(NamedTuple):
    """Where a need stands in the table."""

    kernel: str
    launch: str
    capability: int


Table = dict[Key, Need]


def read_table(path: Path = PATH) -> Table:
    """Give what a file says."""
    return {
        Key(kernel, launch, int(target.removeprefix("sm_"))): Need(*numbers)
        for kernel, lines in tomllib.loads(path.read_text()).items()
        for launch, line in lines.items()
        for target, numbers in line.items()
    }


def largest(needs: Iterable[tuple[Key, Need]]) -> Table:
    """Of several needs with one key, the largest of each number."""
    found: Table = {}
    for key, need in needs:
        before = found.get(key, Need(0, 0))
        found[key] = Need(max(before.registers, need.registers), max(before.shared_bytes, need.shared_bytes))
    return found


def write_table(table: Table, path: Path = PATH) -> None:
    """Put a whole table into a file."""
    lines: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, need in sorted(table.items()):
        lines[key.kernel][key.launch].append(f"sm_{key.capability} = [{need.registers}, {need.shared_bytes}]")
    text = HEAD
    for kernel, launches in lines.items():
        text += f"\n[{kernel}]\n"
        text += "".join(f'"{launch}" = {{ {", ".join(needs)} }}\n' for launch, needs in launches.items())
    path.write_text(text)


def over(table: Table, key: Key, need: Need) -> list[str]:
    """Why a need is not within the table; empty where it is."""
    allowed = table.get(key)
    if allowed is None:
        return ["is not in the table; write it with `python -m tests.gates --write`"]
    names = ("registers", "bytes of shared memory")
    pairs = zip(need, allowed, names, strict=True)
    return [f"needs {number} {name}, the table allows {most}" for number, most, name in pairs if number > most]
