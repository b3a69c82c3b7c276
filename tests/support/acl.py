"""The users of deploy/acl on servers of tests, whole or with a right taken away, and which commands a user calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "acl"
_WITH_SUBCOMMANDS = ("client", "script", "xgroup", "xinfo", "cluster")


def rights_in(name: str) -> list[str]:
    """Commands and key patterns of the one user in `deploy/acl/NAME.acl`."""
    [line] = (FOLDER / f"{name}.acl").read_text().splitlines()
    kind, user, *words = line.split(" ")
    assert (kind, user, words[:2]) == ("user", f"headrace-{name}", ["on", ">change-me"])
    return words[2:]


def set_user(client: redis.Redis, user: str, rights: list[str]) -> None:
    """Make a user with the password `pw`, or make it anew."""
    client.execute_command("ACL", "SETUSER", user, "reset", "on", ">pw", *rights)


def url_of(user: str, port: int) -> str:
    """The address for a user made by `set_user`."""
    return f"redis://{user}:pw@127.0.0.1:{port}/0"


@contextmanager
def commands_called(client: redis.Redis) -> Iterator[set[str]]:
    """Which commands, named as an ACL does, come by TCP or out of scripts; `client` itself is to use a Unix socket."""
    called: set[str] = set()
    ready = threading.Event()

    def watch() -> None:
        with client.monitor() as monitor:
            ready.set()
            for each in monitor.listen():
                words = each["command"].split(" ")
                if words == ["ECHO", "stop-watching"]:
                    return
                if each["client_type"] != "unix":
                    name = words[0].lower()
                    called.add(f"{name}|{words[1].lower()}" if name in _WITH_SUBCOMMANDS else name)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    assert ready.wait(5)
    yield called
    client.execute_command("ECHO", "stop-watching")
    thread.join(5)
