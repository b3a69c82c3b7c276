"""What the gates say to what has been compiled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tests.support.kernel_budget import Key, Need, Table, largest, over

# Binaries of a scripted run, all that an engine needs for one model: each more is a compilation in the first request
# that meets it. A change may lower a number, and raise it only where a kernel was added.
MOST_BINARIES = {"plain": 19, "windows": 22}
NEEDED = {"preemptions", "copies", "mixed", "chunks"}  # without which a script shows nothing


class Done(NamedTuple):
    """A task with its answer."""

    triton: str
    capability: int
    task: dict[str, Any]
    answer: dict[str, Any]
    seconds: float

    @property
    def name(self) -> str:
        what = self.task.get("launch") or f"script {self.task['script']}"
        return f"Triton {self.triton}, sm_{self.capability}, {what}"

    @property
    def kernels(self) -> list[dict[str, Any]]:
        return self.answer.get("kernels", []) if "launch" in self.task else []


def _need(done: Done, kernel: dict[str, Any]) -> tuple[Key, Need]:
    launch = done.task["launch"]
    if kernel["kernel"] in {"_decode", "_merge"}:
        launch = launch.replace(" prefill ", " decode ")  # whose launches come before a prefill's, the same
    key = Key(kernel["kernel"], launch, done.capability)
    return key, Need(kernel["registers"], kernel["shared_bytes"])


def needs(everything: Iterable[Done]) -> Table:
    """The table of what was compiled."""
    return largest(_need(done, kernel) for done in everything for kernel in done.kernels)


def check(everything: Iterable[Done], table: Table) -> list[str]:
    """Every fault, in words; none, where all is well."""
    return [f"{done.name}: {fault}" for done in everything for fault in _faults(done, table)]


def _faults(done: Done, table: Table) -> Iterator[str]:
    if "error" in done.answer:
        yield done.answer["error"]
    elif "script" in done.task:
        yield from script_faults(done.task["script"], done.answer)
    for kernel in done.kernels:
        for fault in (*kernel["faults"], *over(table, *_need(done, kernel))):
            yield f"{kernel['kernel']} {fault}"


def script_faults(name: str, played: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a scripted run."""
    yield from (f"{late}: compiled after the warm-up" for late in played["late"])
    if played["binaries"] > MOST_BINARIES[name]:
        yield f"{played['binaries']} binaries, at most {MOST_BINARIES[name]} are allowed"
    for what in sorted(NEEDED | ({"shared"} if name == "plain" else set())):
        if not played[what]:
            yield f"the script has no {what}"


def table_of(everything: list[Done], seconds: float) -> str:
    """A table in Markdown: a line for each version of Triton and kind of GPU."""
    groups: defaultdict[tuple[str, int], list[Done]] = defaultdict(list)
    for done in everything:
        groups[done.triton, done.capability].append(done)
    lines = [
        "# The Triton kernels, compiled ahead of time",
        "",
        "Made by `python -m tests.gates --report`. A variant is a kernel with its constants; registers are those of a "
        "thread, shared memory is that of a program.",
        "",
        "| Triton | GPU | launches | variants | most registers | spilled | most shared memory | binaries of a scripted "
        "run (after the warm-up) | seconds |",
        "|---|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    lines += [_line(*key, group) for key, group in groups.items()]
    return "\n".join(
        [*lines, "", f"All of it took {seconds:.0f} s, where what is unchanged comes from Triton's cache.", ""]
    )


def _line(triton: str, capability: int, group: list[Done]) -> str:
    kernels = [kernel for done in group for kernel in done.kernels]
    scripts = [
        f"{done.task['script']} {done.answer['binaries']} ({len(done.answer['late'])})"
        for done in group
        if "script" in done.task and "error" not in done.answer
    ]
    cells = (
        triton,
        f"sm_{capability}",
        sum("launch" in done.task for done in group),
        len({kernel["binary"] for kernel in kernels}),
        max((kernel["registers"] for kernel in kernels), default=0),
        len({kernel["binary"] for kernel in kernels if kernel["stack_bytes"]}),
        f"{max((kernel['shared_bytes'] for kernel in kernels), default=0):,} B",
        ", ".join(scripts) or "–",
        f"{sum(done.seconds for done in group):.0f}",
    )
    return f"| {' | '.join(map(str, cells))} |"
