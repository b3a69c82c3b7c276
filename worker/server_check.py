"""What a server must be before a worker entrusts jobs to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from .connection import Failed, Link
from .errors import LinkError, ServerUnsuitableError

LEAST_REDIS: Final = (7, 0)
LEAST_VALKEY: Final = (7, 2)


def check_server(link: Link) -> dict[str, str]:
    """Look at a connected server; what it says of itself. Raises ServerUnsuitableError, LinkError."""
    outcomes = link.exchange([(b"INFO", b"server"), (b"INFO", b"memory")])
    for outcome in outcomes:
        if isinstance(outcome, Failed):
            raise LinkError(f"the server does not tell what it is: {outcome.code} {outcome.message}")
    info = dict(pair for outcome in outcomes if isinstance(outcome, bytes) for pair in info_pairs(outcome))
    check_info(info)
    return info


def is_cluster(info: dict[str, str]) -> bool:
    """Whether a server is a node of a cluster, by what INFO says."""
    return "cluster" in {info.get("redis_mode"), info.get("server_mode")}


def info_pairs(text: bytes) -> list[tuple[str, str]]:
    """Names and values of a reply to INFO."""
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines() if not line.startswith("#"))
    return [(name, value.strip()) for name, colon, value in lines if colon]


def check_info(info: dict[str, str]) -> None:
    """Judge what INFO says. Raises ServerUnsuitableError with one sentence that says what to do."""
    for trouble in (too_old(info), evicting(info)):
        if trouble is not None:
            raise ServerUnsuitableError(f"{trouble[0]}: {trouble[1]}")


def too_old(info: Mapping[str, str]) -> tuple[str, str] | None:
    """What is wrong with the server's version, and what to do; None if nothing is."""
    valkey = info.get("valkey_version")
    name, version, least = (
        ("Valkey", valkey, LEAST_VALKEY) if valkey else ("Redis", info.get("redis_version", ""), LEAST_REDIS)
    )
    if version_of(version) >= least:
        return None
    return f"the server is {name} {version or 'of unknown version'}", f"use {'.'.join(map(str, least))} or later"


def evicting(info: Mapping[str, str]) -> tuple[str, str] | None:
    """What is wrong with the server's eviction policy, and what to do; None if nothing is."""
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return None
    seen = f"the server's maxmemory-policy is {policy}, by which it may delete jobs"
    return seen, "run CONFIG SET maxmemory-policy noeviction"


def version_of(text: str) -> tuple[int, int]:
    """Major and minor number of a version, (0, 0) if it is none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
