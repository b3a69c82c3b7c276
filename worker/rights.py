"""What workers and clients must be allowed on the server, and how to find out: each right is tried, without any effect.

Servers look at rights before anything else of a command but the number of its words. So each right is tried by a
command that does nothing even where it is allowed: with an id or a number that is none, or on a key that is not there.
A user with few rights may not ask about them (ACL DRYRUN), but may try.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ..clients.keys import GROUP, Keys
from .cluster import AnyLink
from .connection import FORBIDDEN, Failed
from .errors import LinkError, ServerUnavailableError
from .lua import Args

if TYPE_CHECKING:
    from .log import Log

Role: TypeAlias = Literal["worker", "client"]

_ALARM_EVERY_S: Final = 10.0
_NO_ID: Final = b"no-id"
_NO_NUMBER: Final = b"no-number"
_NO_SHA: Final = b"0" * 40
_NO_SCRIPT: Final = b"("
_COMMAND = re.compile(r"'([a-z|]+)' command")
_WITH_SUBCOMMANDS: Final = frozenset({"script", "xgroup", "xinfo"})
_WORKER: Final[tuple[Role, ...]] = ("worker",)
_CLIENT: Final[tuple[Role, ...]] = ("client",)
_BOTH: Final[tuple[Role, ...]] = ("worker", "client")


@dataclass(frozen=True, slots=True)
class Right:
    """A command on keys of a kind."""

    pattern: str  # of the keys, as an ACL has it; empty for a command without any
    roles: tuple[Role, ...]  # who needs it
    trial: Args  # changes nothing

    @property
    def name(self) -> str:
        """The command, as an ACL has it."""
        words = [str(word, "ascii").lower() for word in self.trial[:2] if isinstance(word, bytes)]
        return "|".join(words) if words[0] in _WITH_SUBCOMMANDS else words[0]

    def lacking_by(self, message: str) -> str:
        """What a refusal of its trial says is missing: `+xack`, `~headrace:req:*`."""
        return f"+{self.name}" if _COMMAND.search(message) else self.pattern


def rights_of(keys: Keys, nobody: str) -> list[Right]:
    """All that the protocol takes beyond connecting. `nobody`: a name of no request, and of no worker but oneself."""
    return [
        Right("", _BOTH, (b"TIME",)),
        Right("", _WORKER, (b"INFO", b"server")),
        Right("", _WORKER, (b"SCRIPT", b"LOAD", _NO_SCRIPT)),
        Right("", _CLIENT, (b"PING",)),
        *_on_the_queue(keys, nobody),
        *_on_requests(keys, nobody),
        *_on_workers(keys, nobody),
    ]


def _on_the_queue(keys: Keys, nobody: str) -> list[Right]:
    jobs, dead, of_jobs = keys.jobs(), keys.dead, f"~{keys.jobs()}*"
    of_workers = [
        *((b"EVALSHA", _NO_SHA, 1, key) for key in keys.all_jobs),
        (b"XGROUP", b"CREATE", jobs, GROUP, _NO_ID),
        (b"XGROUP", b"DELCONSUMER", jobs, GROUP, nobody),
        (b"XREADGROUP", b"GROUP", GROUP, nobody, b"STREAMS", jobs, _NO_ID),
        (b"XPENDING", jobs, GROUP, _NO_ID, b"+", 1),
        (b"XCLAIM", jobs, GROUP, nobody, 0, _NO_ID),
        (b"XACK", jobs, GROUP, _NO_ID),
        (b"XDEL", jobs, _NO_ID),
        (b"XINFO", b"CONSUMERS", jobs, GROUP),
        (b"XRANGE", jobs, _NO_ID, b"+"),
    ]
    of_clients = [(b"XADD", jobs, _NO_ID, b"f", b"v"), (b"XLEN", jobs), (b"XINFO", b"GROUPS", jobs)]
    of_dead = [(b"EVALSHA", _NO_SHA, 1, dead), (b"XADD", dead, _NO_ID, b"f", b"v")]
    return [
        *(Right(of_jobs, _WORKER, trial) for trial in of_workers),
        *(Right(of_jobs, _CLIENT, trial) for trial in of_clients),
        *(Right(f"~{dead}", _WORKER, trial) for trial in of_dead),
    ]


def _on_requests(keys: Keys, nobody: str) -> list[Right]:
    out, flag = keys.out(nobody), keys.cancel(nobody)
    of_both = [
        (b"EVALSHA", _NO_SHA, 1, out),
        (b"EVALSHA", _NO_SHA, 1, flag),
        (b"XADD", out, _NO_ID, b"f", b"v"),
        (b"XRANGE", out, _NO_ID, b"+"),
        (b"XREVRANGE", out, _NO_ID, b"-"),
        (b"PEXPIRE", out, _NO_NUMBER),
        (b"EXISTS", flag),
        (b"DEL", flag),
    ]
    of_clients = [
        (b"EVAL", _NO_SCRIPT, 1, out),
        (b"XREAD", b"STREAMS", out, _NO_ID),
        (b"PTTL", out),
        (b"SET", flag, b"1", _NO_NUMBER),
    ]
    pattern = f"~{keys.prefix}:req:*"
    both = [Right(pattern, _BOTH, trial) for trial in of_both]
    return [*both, *(Right(pattern, _CLIENT, trial) for trial in of_clients)]


def _on_workers(keys: Keys, nobody: str) -> list[Right]:
    own = keys.worker(nobody)
    trials = [
        (b"EVALSHA", _NO_SHA, 1, own),
        (b"HSET", own, b"field", b"value", b"one-too-many"),
        (b"PEXPIRE", own, _NO_NUMBER),
        (b"EXISTS", own),
        (b"DEL", own),
    ]
    return [Right(f"~{own.removesuffix(nobody)}*", _WORKER, trial) for trial in trials]


def check_rights(link: AnyLink, keys: Keys, worker: str, user: str) -> None:
    """Try all that a worker needs. Raises LinkError where no reply comes.

    Raises ServerUnavailableError, which names what is missing and the line to add, or that this is a replica.
    """
    needed = [right for right in rights_of(keys, worker) if "worker" in right.roles]
    outcomes = link.exchange([right.trial for right in needed])
    for outcome in outcomes:
        if isinstance(outcome, Failed) and outcome.code == "LOST":
            raise LinkError(outcome.message)
        if isinstance(outcome, Failed) and outcome.code == "READONLY":
            raise ServerUnavailableError("the server is a replica and takes no writes: give the master's address")
    lacking = [
        right.lacking_by(outcome.message)
        for right, outcome in zip(needed, outcomes, strict=True)
        if isinstance(outcome, Failed) and outcome.code == FORBIDDEN
    ]
    if not lacking:
        return
    words = list(dict.fromkeys(sorted(lacking, key=lambda word: word[0] == "~")))  # commands first
    raise ServerUnavailableError(f"the user {user} may not do what a worker does: {line_to_add(user, words)}")


def line_to_add(user: str, words: Sequence[str]) -> str:
    """How to give a user the rights that are missing, in words."""
    return f"missing {' '.join(words)}; run ACL SETUSER {user} {' '.join(words)}"


def missing_in(message: str) -> list[str]:
    """What a server's refusal says is missing, as an ACL has it; empty for keys, of which it does not say which."""
    found = _COMMAND.search(message)
    return [f"+{found[1]}"] if found else []


class Alarms:
    """What a person must see to while a worker runs. Any thread may raise one."""

    def __init__(self, log: Log, worker: str, user: str) -> None:
        self._log = log
        self._worker = worker
        self._user = user
        self._next_s = 0.0

    def stalled(self) -> None:
        """The step loop hangs."""
        self._log.error("the step loop makes no progress: leases are not renewed", worker=self._worker)

    def renewal_failed(self, error: Exception) -> None:
        """A round of renewals ended in something that nobody foresaw; the next one is tried."""
        self._log.error("leases cannot be renewed", worker=self._worker, error=repr(error), exc_info=error)

    def forbidden(self, codes: Mapping[str, str]) -> None:
        """Say what the server forbids, if that is among the errors of a pipeline: at once, and again while it lasts."""
        if FORBIDDEN in codes and (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + _ALARM_EVERY_S
            message = codes[FORBIDDEN]
            what = line_to_add(self._user, missing) if (missing := missing_in(message)) else message
            self._log.error(
                "the server forbids what this worker does: jobs wait until it is allowed",
                worker=self._worker,
                what=what,
            )
