"""What the current user may not do, of all that a worker and a client have to.

A server tells a user without further rights nothing about its own. But it looks at rights before it looks at what a
command says, so each probe is a command that it refuses, or that finds nothing to do, in any case: with a number that
is none, an id that is none, a group or key that is not there. Nothing is written, whatever the rights are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from redis.exceptions import NoPermissionError

from ...clients.keys import GROUP, Keys

Command = tuple[str | bytes | int, ...]
_NO_NUMBER: Final = "no-number"


@dataclass(frozen=True, slots=True)
class Probe:
    """A command that does nothing, and who needs it."""

    command: Command
    roles: tuple[str, ...] = ("worker", "client")

    @property
    def name(self) -> str:
        """The command, as ACL rules name it."""
        words = [str(word).lower() for word in self.command]
        return "|".join(words[:2]) if words[0] in {"xgroup", "xinfo", "script"} else words[0]


def probes(keys: Keys) -> tuple[Probe, ...]:
    """Everything that the protocol takes, on its keys; no request and no worker of the names used is there."""
    nobody = uuid4().hex
    jobs, dead, worker = keys.jobs(), keys.dead, keys.worker(nobody)
    out, flag = keys.out(nobody), keys.cancel(nobody)
    only_worker, only_client = ("worker",), ("client",)
    return (
        Probe(("TIME",)),
        Probe(("INFO", "server"), only_worker),
        Probe(("PING",), only_client),
        Probe(("SCRIPT", "LOAD", "("), only_worker),
        Probe(("EVALSHA", nobody, 2, out, flag)),
        Probe(("EVALSHA", nobody, 2, jobs, dead), only_worker),
        Probe(("EVAL", "(", 2, out, flag), only_client),
        # the queue
        Probe(("XADD", jobs, _NO_NUMBER, "a", "b"), only_client),
        Probe(("XADD", dead, _NO_NUMBER, "a", "b"), only_worker),
        Probe(("XLEN", jobs), only_client),
        Probe(("XINFO", "GROUPS", jobs), only_client),
        Probe(("XINFO", "CONSUMERS", jobs, nobody), only_worker),
        Probe(("XGROUP", "CREATE", jobs, GROUP, _NO_NUMBER), only_worker),
        Probe(("XGROUP", "DELCONSUMER", jobs, nobody, nobody), only_worker),
        Probe(("XREADGROUP", "GROUP", GROUP, nobody, "COUNT", _NO_NUMBER, "STREAMS", jobs, ">"), only_worker),
        Probe(("XPENDING", jobs, nobody), only_worker),
        Probe(("XCLAIM", jobs, GROUP, nobody, _NO_NUMBER, "0-1"), only_worker),
        Probe(("XACK", jobs, nobody, "0-1"), only_worker),
        Probe(("XDEL", jobs, _NO_NUMBER), only_worker),
        Probe(("HSET", worker, "a", "b", "c"), only_worker),
        # a request
        Probe(("XADD", out, _NO_NUMBER, "a", "b")),
        Probe(("PEXPIRE", out, _NO_NUMBER)),
        Probe(("XRANGE", out, "-", "+", "COUNT", 1)),
        Probe(("XREVRANGE", out, "+", "-", "COUNT", 1)),
        Probe(("XREAD", "COUNT", 1, "STREAMS", out, "0-0"), only_client),
        Probe(("PTTL", out), only_client),
        Probe(("SET", flag, "1", _NO_NUMBER), only_client),
        Probe(("EXISTS", flag)),
        Probe(("DEL", flag)),
    )


def lacking(keys: Keys, asked: Sequence[Probe], outcomes: Sequence[Any]) -> Mapping[str, tuple[str, ...]]:
    """By role, what the user may not do, as the ACL rules that would allow it: `+xack`, `~headrace:req:*`."""
    found: dict[str, list[str]] = {}
    for probe, outcome in zip(asked, outcomes, strict=True):
        if isinstance(outcome, NoPermissionError):
            is_command = "to run the" in str(outcome)  # the other kind speaks of keys
            for role in probe.roles:
                found.setdefault(role, []).append(f"+{probe.name}" if is_command else _pattern(keys, probe))
    return {role: tuple(dict.fromkeys(rules)) for role, rules in found.items()}


def _pattern(keys: Keys, probe: Probe) -> str:
    is_request = any(str(word).startswith(f"{keys.prefix}:req:") for word in probe.command)
    return f"~{keys.prefix}:req:*" if is_request else f"~{keys.prefix}:{{{keys.queue}}}:*"
