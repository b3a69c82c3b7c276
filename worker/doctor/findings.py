"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"  # jobs are not served, may be lost, or answered wrongly
    WARNING = "warning"  # it works, and somebody should look


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    severity: Severity
    check: str  # its name: stable, for scripts
    seen: str  # what was seen
    do: str  # what to do about it


def error(check: str, seen: str, do: str) -> Finding:
    """Something that must be mended."""
    return Finding(Severity.ERROR, check, seen, do)


def warning(check: str, seen: str, do: str) -> Finding:
    """Something to look at."""
    return Finding(Severity.WARNING, check, seen, do)
