"""What a worker's user must be allowed on the server, and how to find out: each right is tried, without any effect.

Servers look at rights before anything else of a command but the number of its words. So each right is tried by a
command that does nothing even where it is allowed: with an id that is none, on a key that is this worker's own and not
there yet. A user with few rights may not ask about them (ACL DRYRUN), but may try.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..clients.keys import GROUP, Keys
from .cluster import AnyLink
from .connection import FORBIDDEN, Failed
from .errors import LinkError, ServerUnavailableError
from .lua import Args

if TYPE_CHECKING:
    from .log import Log

_ALARM_EVERY_S: Final = 10.0
_NO_ID: Final = b"no-id"
_NO_SHA: Final = b"0" * 40
_COMMAND = re.compile(r"'([a-z|]+)' command")


@dataclass(frozen=True, slots=True)
class Right:
    """A command on keys of a kind. `name` and `pattern` are as an ACL has them, `trial` changes nothing."""

    name: str
    pattern: str
    trial: Args


def rights_of(keys: Keys, worker: str) -> list[Right]:
    """All that a worker needs beyond what connecting takes."""
    jobs, dead, own = keys.jobs(), keys.dead, keys.worker(worker)
    out, flag = keys.out(worker), keys.cancel(worker)
    of_jobs, of_requests = f"~{jobs}*", f"~{out.partition(f'{{{worker}}}')[0]}*"
    of_workers = f"~{own.removesuffix(worker)}*"
    return [
        *(Right("evalsha", of_jobs, (b"EVALSHA", _NO_SHA, 1, key)) for key in keys.all_jobs),
        Right("evalsha", f"~{dead}", (b"EVALSHA", _NO_SHA, 1, dead)),
        Right("evalsha", of_workers, (b"EVALSHA", _NO_SHA, 1, own)),
        Right("evalsha", of_requests, (b"EVALSHA", _NO_SHA, 1, out)),
        Right("evalsha", of_requests, (b"EVALSHA", _NO_SHA, 1, flag)),
        Right("xgroup|create", of_jobs, (b"XGROUP", b"CREATE", jobs, GROUP, _NO_ID)),
        Right("xgroup|delconsumer", of_jobs, (b"XGROUP", b"DELCONSUMER", jobs, GROUP, worker)),
        Right("xreadgroup", of_jobs, (b"XREADGROUP", b"GROUP", GROUP, worker, b"STREAMS", jobs, _NO_ID)),
        Right("xpending", of_jobs, (b"XPENDING", jobs, GROUP, _NO_ID, b"+", 1)),
        Right("xclaim", of_jobs, (b"XCLAIM", jobs, GROUP, worker, 0, _NO_ID)),
        Right("xack", of_jobs, (b"XACK", jobs, GROUP, _NO_ID)),
        Right("xdel", of_jobs, (b"XDEL", jobs, _NO_ID)),
        Right("xinfo|consumers", of_jobs, (b"XINFO", b"CONSUMERS", jobs, GROUP)),
        Right("xadd", f"~{dead}", (b"XADD", dead, _NO_ID, b"f", b"v")),
        Right("xadd", of_requests, (b"XADD", out, _NO_ID, b"f", b"v")),
        Right("xrange", of_requests, (b"XRANGE", out, _NO_ID, b"+")),
        Right("xrange", of_jobs, (b"XRANGE", jobs, _NO_ID, b"+")),
        Right("xrevrange", of_requests, (b"XREVRANGE", out, _NO_ID, b"-")),
        Right("pexpire", of_requests, (b"PEXPIRE", out, b"no-number")),
        Right("exists", of_requests, (b"EXISTS", flag)),
        Right("exists", of_workers, (b"EXISTS", own)),
        Right("del", of_requests, (b"DEL", flag)),
        Right("del", of_workers, (b"DEL", own)),
        Right("hset", of_workers, (b"HSET", own, b"field", b"value", b"one-too-many")),
        Right("pexpire", of_workers, (b"PEXPIRE", own, b"no-number")),
        Right("time", "", (b"TIME",)),
    ]


def check_rights(link: AnyLink, keys: Keys, worker: str, user: str) -> None:
    """Try all that a worker needs. Raises LinkError where no reply comes.

    Raises ServerUnavailableError, which names what is missing and the line to add.
    """
    needed = rights_of(keys, worker)
    outcomes = link.exchange([right.trial for right in needed])
    for outcome in outcomes:
        if isinstance(outcome, Failed) and outcome.code == "LOST":
            raise LinkError(outcome.message)
    refused = [
        (right, outcome.message)
        for right, outcome in zip(needed, outcomes, strict=True)
        if isinstance(outcome, Failed) and outcome.code == FORBIDDEN
    ]
    if not refused:
        return
    names = [f"+{right.name}" for right, message in refused if _COMMAND.search(message)]
    patterns = [right.pattern for right, message in refused if not _COMMAND.search(message)]
    words = list(dict.fromkeys(names + patterns))
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
