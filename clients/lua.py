"""Lua scripts as files of a package, with the SHA-1 under which a server knows them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Script:
    """A script: `sha` for EVALSHA, `source` for where the server does not have it yet."""

    name: str
    source: str
    sha: str


def load_script(package: str, name: str) -> Script:
    """Read `scripts/NAME.lua` of `package`. Raises FileNotFoundError if the package has none of this name."""
    source = (files(package) / "scripts" / f"{name}.lua").read_text(encoding="utf-8")
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


# KEYS: out, cancel. ARGV: newest id seen, new id, field, payload, TTL in ms or 0, '1' to delete the flag.
APPEND = load_script(__package__ or "headrace.clients", "append")
# KEYS: out, cancel. ARGV: newest id seen, TTL in ms of the flag where there is no stream.
CANCEL = load_script(__package__ or "headrace.clients", "cancel")
