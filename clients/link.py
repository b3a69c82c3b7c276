"""How steps reach Redis: redis-py, with its defaults chosen on purpose, and its errors told apart.

- No silent retries: redis-py would send a write again after a lost reply, and reconnect without a word in between
  reads. Steps decide on that.
- A blocking read ends well before the socket's own limit.
- A stream is read on a connection of its own, so that a lost one is seen as an error.
- RESP2, and bytes as they are: a client that decodes replies cannot carry msgpack.

A client that a caller hands in keeps its own retries and limits: the protocol's checks hold with those too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import Any, Final, TypeVar, cast

from redis import exceptions

from .errors import ServerError
from .steps import Command, LostReplyError, Pause, RunScript, Step
from .target import AsyncTarget, Target
from .tls import tls_hint, tls_trouble

T = TypeVar("T")

# Errors of a server that cannot do it now: it starts, fails over, has no memory or disk, or is busy with a script.
_NOT_NOW = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.MasterDownError,
    exceptions.ClusterError,
)
_NOT_NOW_CODES = ("MISCONF", "NOREPLICAS", "UNBLOCKED", "BUSY", "LOADING", "MASTERDOWN", "OOM", "READONLY")
_ELSEWHERE = (exceptions.MovedError, exceptions.AskError)
ERRORS = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
_FOR_GOOD = (exceptions.AuthenticationError, exceptions.AuthorizationError)
_NO_CLUSTER: Final = "Cluster mode is not enabled"
_MAX_REASON_LEN = 200


def told_apart(error: BaseException) -> Exception:
    """LostReplyError for what may pass, ServerError for what will not."""
    if isinstance(error, exceptions.RedisClusterException) and isinstance(error.__cause__, ERRORS):
        return told_apart(error.__cause__)  # why none of a Cluster's nodes could be used
    if trouble := tls_trouble(error):
        return ServerError(trouble)
    # A server that does not know a command repeats its arguments, and a prompt may be among them.
    reason = str(error).split(", with args beginning with", maxsplit=1)[0][:_MAX_REASON_LEN]
    reason = f"{type(error).__name__}: {tls_hint(error) or reason}"
    return LostReplyError(reason) if _may_pass(error) else ServerError(reason)


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, _FOR_GOOD):
        return False
    if isinstance(error, exceptions.RedisClusterException):  # no node answers, or slots are nobody's at present
        return _NO_CLUSTER not in str(error)
    if isinstance(error, exceptions.ResponseError) and str(error).startswith(_NOT_NOW_CODES):
        return True
    return isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError, OSError, *_NOT_NOW))


def _is_elsewhere(error: Exception) -> bool:
    """Whether the address may lead to another node now: a master without replicas may be one that was given up."""
    return isinstance(error, exceptions.ReadOnlyError) or str(error).startswith("NOREPLICAS")


def is_race(error: RuntimeError) -> bool:
    """Whether redis-py has met its own map of a Cluster in another thread's hands, which renewed it meanwhile."""
    return str(error).startswith("dictionary ")


def routing(client: Any, key: str) -> dict[str, Any]:
    """Arguments for execute_command: in a cluster, the node of the key, which redis-py finds for few commands only."""
    find = getattr(client, "get_node_from_key", None)
    return {} if find is None else {"target_nodes": find(key)}


def script_by_sha(step: RunScript) -> tuple[Any, ...]:
    """For a server that has the script already."""
    return ("EVALSHA", step.script.sha, len(step.keys), *step.keys, *step.args)


def script_by_text(step: RunScript) -> tuple[Any, ...]:
    """The same with the script's text: the server keeps that, and in a cluster it is the node that lacks it."""
    return ("EVAL", step.script.source, len(step.keys), *step.keys, *step.args)


class Link:
    """Runs steps, waiting for each."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.max_block_ms = target.max_block_ms

    @classmethod
    def to(cls, target: object) -> Link:
        """To a URL, or through a client of the caller's. Raises ConfigError."""
        return cls(Target.of(target))

    def run(self, steps: Generator[Step, Any, T]) -> T:
        """Run steps to their end and give what they return. Raises what they raise, and ServerError."""
        try:
            step = next(steps)
            while True:
                try:
                    reply = self._do(step)
                except LostReplyError as lost:
                    step = steps.throw(lost)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            return cast("T", stop.value)

    def reading(self) -> Link:
        """A link of its own for one reader."""
        return _ReadingLink(self._target)

    def close(self) -> None:
        """Close the connections, if the client is this link's own."""
        self._target.close()

    def _client(self) -> Any:
        return self._target.client()

    def _do(self, step: Step) -> Any:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        try:
            try:
                return self._send(step)
            except _ELSEWHERE:
                if not self._target.become_cluster():
                    raise
                return self._send(step)
        except ERRORS as error:
            if _is_elsewhere(error):
                self._target.leave_node()
            self._failed()
            raise told_apart(error) from None
        except RuntimeError as error:
            if not is_race(error):
                raise
            self._failed()
            raise LostReplyError(str(error)) from None

    def _failed(self) -> None:
        """A command has failed."""

    def _send(self, step: Command | RunScript) -> Any:
        client = self._client()
        if isinstance(step, Command):
            return client.execute_command(*step.args, **routing(client, step.key))
        options = routing(client, step.keys[0])
        try:
            return client.execute_command(*script_by_sha(step), **options)
        except exceptions.NoScriptError:
            return client.execute_command(*script_by_text(step), **options)


class _ReadingLink(Link):
    """On one connection, taken from the client's pool by the first command and given back at the end."""

    _dedicated: Any = None

    def close(self) -> None:
        if self._dedicated is not None:
            self._dedicated.close()
            self._dedicated = None

    def _failed(self) -> None:
        self.close()  # a connection that reconnects by itself does not ask sentinels where to

    def _client(self) -> Any:
        if self._target.is_cluster():
            self.close()
            return self._target.client()
        if self._dedicated is None:
            self._dedicated = self._target.client().client()
        return self._dedicated


class AsyncLink:
    """Runs steps, awaiting each."""

    def __init__(self, target: AsyncTarget) -> None:
        self._target = target
        self.max_block_ms = target.max_block_ms

    @classmethod
    def to(cls, target: object) -> AsyncLink:
        """To a URL, or through a client of the caller's. Raises ConfigError."""
        return cls(AsyncTarget.of(target))

    async def run(self, steps: Generator[Step, Any, T]) -> T:
        """As Link.run."""
        try:
            step = next(steps)
            while True:
                try:
                    reply = await self._do(step)
                except LostReplyError as lost:
                    step = steps.throw(lost)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            return cast("T", stop.value)

    def reading(self) -> AsyncLink:
        """A link of its own for one reader."""
        return _AsyncReadingLink(self._target)

    async def close(self) -> None:
        """Close the connections, if the client is this link's own."""
        await self._target.close()

    async def _client(self) -> Any:
        return await self._target.client()

    async def _do(self, step: Step) -> Any:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        try:
            try:
                return await self._send(step)
            except _ELSEWHERE:
                if not await self._target.become_cluster():
                    raise
                return await self._send(step)
        except AttributeError as error:
            # When redis-py reads a Cluster's map anew, it closes its connections under the tasks that are about to
            # write to them, and those find None in their place.
            if not self._target.is_cluster():
                raise
            raise LostReplyError(f"closed meanwhile: {error}") from None
        except ERRORS as error:
            if _is_elsewhere(error):
                await self._target.leave_node()
            await self._failed()
            raise told_apart(error) from None

    async def _failed(self) -> None:
        """A command has failed."""

    async def _send(self, step: Command | RunScript) -> Any:
        client = await self._client()
        if isinstance(step, Command):
            return await client.execute_command(*step.args, **routing(client, step.key))
        options = routing(client, step.keys[0])
        try:
            return await client.execute_command(*script_by_sha(step), **options)
        except exceptions.NoScriptError:
            return await client.execute_command(*script_by_text(step), **options)


class _AsyncReadingLink(AsyncLink):
    """On one connection, taken from the client's pool by the first command and given back at the end."""

    _dedicated: Any = None

    async def close(self) -> None:
        if self._dedicated is not None:
            dedicated, self._dedicated = self._dedicated, None
            await dedicated.aclose()

    async def _failed(self) -> None:
        await self.close()

    async def _client(self) -> Any:
        if self._target.is_cluster():
            await self.close()
            return await self._target.client()
        if self._dedicated is None:
            self._dedicated = (await self._target.client()).client()
        return self._dedicated
