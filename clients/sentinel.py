"""Asking sentinels for the master: redis-py's classes, with an error that tells what each sentinel said.

Every new connection asks anew, and asks the server that it was sent to whether it is a master: sentinels may be behind,
and one that was cut off names the old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from redis import asyncio as aio
from redis import exceptions
from redis.asyncio import sentinel as aio_sentinel
from redis.sentinel import MasterNotFoundError, Sentinel

from .tls import tls_hint, tls_trouble

# A sentinel is close and does nothing but answer; while one is silent, the next could have.
SENTINEL_TIMEOUT_S: Final = 1.0
_ERRORS = (exceptions.RedisError, OSError)


class MasterFinder(Sentinel):
    """Sentinels, asked in turn, the one that answered last first."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Host and port of the master. Raises MasterNotFoundError."""
        said: list[str] = []
        for number, sentinel in enumerate(list(self.sentinels)):
            try:
                masters = cast("Any", sentinel).sentinel_masters()
            except _ERRORS as error:
                said.append(_silent(sentinel, error))
                continue
            if not (why_not := _why_not(masters, service_name)):
                self.sentinels[0], self.sentinels[number] = self.sentinels[number], self.sentinels[0]
                return masters[service_name]["ip"], masters[service_name]["port"]
            said.append(f"{_place(sentinel)} {why_not}")
        raise MasterNotFoundError(_no_master(service_name, said))


class AsyncMasterFinder(aio_sentinel.Sentinel):
    """The same for asyncio."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """As MasterFinder.discover_master."""
        said: list[str] = []
        for number, sentinel in enumerate(list(self.sentinels)):
            try:
                masters = await cast("Any", sentinel).sentinel_masters()
            except _ERRORS as error:
                said.append(_silent(sentinel, error))
                continue
            if not (why_not := _why_not(masters, service_name)):
                self.sentinels[0], self.sentinels[number] = self.sentinels[number], self.sentinels[0]
                return masters[service_name]["ip"], masters[service_name]["port"]
            said.append(f"{_place(sentinel)} {why_not}")
        raise aio_sentinel.MasterNotFoundError(_no_master(service_name, said))


def _why_not(masters: Mapping[str, Any], service: str) -> str:
    """Why a sentinel names no master; empty if it names one."""
    state = masters.get(service)
    if state is None:
        return f"knows only {', '.join(sorted(masters)) or 'no service at all'}"
    if not state["is_master"] or state["is_sdown"] or state["is_odown"]:
        return f"says that {state['ip']}:{state['port']} is down"
    return ""


def _silent(sentinel: Any, error: Exception) -> str:
    return f"{_place(sentinel)} gives no answer ({tls_trouble(error) or tls_hint(error) or error})"


def _place(sentinel: Any) -> str:
    kwargs = sentinel.connection_pool.connection_kwargs
    return f"{kwargs['host']}:{kwargs['port']}"


def _no_master(service: str, said: list[str]) -> str:
    """One sentence that begins with what is wrong, and then what each sentinel said."""
    if all("gives no answer" in each for each in said):
        what = "no sentinel answers"
    elif any("is down" in each for each in said):
        what = f"the master of service {service} is down, and no other has been promoted yet"
    else:
        what = f"no sentinel knows a service {service}"
    return f"{what}: {'; '.join(said)}"


def on_connect(connection: Any) -> None:
    """Set a new connection up as redis-py does, and see that the server is a master. Raises redis.ConnectionError."""
    connection.on_connect()
    connection.send_command("ROLE")
    _check_role(connection.read_response(), connection)


async def on_async_connect(connection: aio.Connection) -> None:
    """As on_connect."""
    await connection.on_connect()
    await connection.send_command("ROLE")
    _check_role(await connection.read_response(), connection)


def _check_role(reply: Any, connection: Any) -> None:
    if (role := bytes(reply[0]).decode()) != "master":
        raise exceptions.ConnectionError(f"the sentinels name {connection.host}:{connection.port}, which is a {role}")
