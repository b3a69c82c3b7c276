"""`headrace doctor`: look at the server and the queue, say what is wrong and what to do; change nothing."""

from __future__ import annotations

import sys

import redis

from ..clients.address import redact
from ..clients.keys import Keys
from .command import command
from .doctor.checks import findings_of
from .doctor.findings import Finding, Severity, error
from .doctor.look import Limits, look
from .doctor.seen import Seen
from .exit_codes import CommandError, ExitCode
from .reach import connected
from .settings_client import DoctorFlags


@command(DoctorFlags)
def doctor(settings: DoctorFlags) -> ExitCode:
    """Look at the server and the queue: what is wrong, and what to do."""
    keys = Keys(settings.prefix, settings.queue)
    limits = Limits(settings.lease, settings.queue_ttl, settings.max_keys, settings.max_time)
    try:
        with connected(settings, anywhere=True) as client:
            seen = look(client, keys, limits)
    except (CommandError, redis.RedisError) as trouble:
        if isinstance(trouble, CommandError) and trouble.code is not ExitCode.SERVER_UNAVAILABLE:
            raise
        do = "start the server, or mend --redis-url, the password or the user's rights"
        _report(None, [error("unreachable", redact(str(trouble)), do)], as_json=settings.as_json)
        return ExitCode.SERVER_UNAVAILABLE
    findings = findings_of(seen)
    _report(seen, findings, as_json=settings.as_json)
    if any(each.severity is Severity.ERROR for each in findings):
        return ExitCode.ERRORS_FOUND
    return ExitCode.WARNINGS_FOUND if findings else ExitCode.OK


def _report(seen: Seen | None, findings: list[Finding], *, as_json: bool) -> None:
    from .doctor import view

    if as_json:
        sys.stdout.write(view.as_json(seen, findings))
    else:
        view.show(seen, findings)
