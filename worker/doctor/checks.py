"""All checks over what was seen, worst first."""

from __future__ import annotations

from dataclasses import replace

from .check_queue import QUEUE_CHECKS
from .check_server import NODE_CHECKS
from .findings import Finding, Severity
from .seen import Seen


def findings_of(seen: Seen) -> list[Finding]:
    """What is wrong: errors first, of one severity in the order of the checks."""
    found: list[Finding] = []
    for node in seen.nodes:
        where = f"{node.address}: " if len(seen.nodes) > 1 else ""
        found += [replace(each, seen=where + each.seen) for check in NODE_CHECKS for each in check(node)]
    found += [each for check in QUEUE_CHECKS for each in check(seen)]
    return sorted(found, key=lambda each: each.severity is not Severity.ERROR)
