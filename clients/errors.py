"""What can go wrong for a client, and, in the two classes on jobs, for a worker that reads what a client sent.

HeadraceError
├── ConfigError              a name, URL, option of the client or kept cursor that cannot be
├── InvalidJobError          a job that no worker would run: code, message, param
│   ├── PayloadError         its payload cannot be decoded, or not by the rules
│   └── InvalidEntryError    its entry in the jobs stream: goes to `dead`
├── QueueFullError           as many jobs wait as the caller allows
├── ConflictError            the id names another request
├── UnavailableError         Redis was out of reach, or took no writes, for longer than the caller allows
├── ServerError              Redis refused a command for a reason that waiting does not mend
├── RequestFailedError       the request ended with an error: code, message, param
└── StreamError              the request's stream cannot be followed, or not further
    ├── GapError             tokens are missing
    ├── RewoundError         the stream has lost what was read from it already
    ├── ExpiredError         the stream was there and is gone
    ├── ChangedError         the id has come to name another request
    ├── MalformedEntryError  an entry that breaks the protocol
    └── WaitTimeoutError     nothing came within the caller's own limit

No message holds a prompt, an output, a password or a URL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .events import Finished
    from .results import Result

_MAX_NAME_LEN = 64


def shown_name(name: str) -> str:
    """A key or field name as messages and `param` show it: it can always be encoded, and is of bounded length."""
    safe = name[:_MAX_NAME_LEN].encode("utf-8", "backslashreplace").decode("utf-8")
    return safe if len(name) <= _MAX_NAME_LEN else safe + "…"


class HeadraceError(Exception):
    """Whatever this package raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """A setting that cannot be. `param` names it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidJobError(HeadraceError, ValueError):
    """A job that no worker would run: `code` as the protocol names it, `param` the field at fault, if it is one."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(f"{code}: {message}" + (f" ({param})" if param else ""))
        self.code = code
        self.message = message
        self.param = param


class PayloadError(InvalidJobError):
    """Bytes that are not the map they should be.

    `code` is `payload_undecodable` (a job goes to `dead`) or `invalid_request` (decoded, but against the rules).
    """


class InvalidEntryError(InvalidJobError):
    """An entry of a jobs stream that goes to `dead`; if `id` is not None, also to that request's stream.

    `kind` is how the request is to be answered: "json" if the entry held `json` and no `job`, else "d".
    """

    def __init__(self, message: str, param: str, request_id: str | None, kind: str) -> None:
        super().__init__("payload_undecodable", message, param)
        self.id = request_id
        self.kind = kind


class QueueFullError(HeadraceError):
    """`num_waiting` jobs wait, and the caller allows `max_backlog`. Nothing was written."""

    def __init__(self, num_waiting: int, max_backlog: int) -> None:
        super().__init__(f"{num_waiting} jobs wait in the queue, {max_backlog} are allowed")
        self.num_waiting = num_waiting
        self.max_backlog = max_backlog


class ConflictError(HeadraceError):
    """`id` names another request already: its fingerprint is `existing_fp` (None if unknown), the caller's `fp`."""

    def __init__(self, request_id: str, fp: str, existing_fp: str | None) -> None:
        super().__init__(f"request {request_id} exists with another payload")
        self.id = request_id
        self.fp = fp
        self.existing_fp = existing_fp


class UnavailableError(HeadraceError):
    """Redis was out of reach, or took no writes, for too long. `id` is the request's.

    For a submission it is not known whether the job is in: submitting the same with the same `id` is safe.
    """

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"Redis did not answer as it should for request {request_id}: {reason}")
        self.id = request_id
        self.reason = reason


class ServerError(HeadraceError):
    """Redis refused a command for a reason that waiting does not mend: credentials, rights, a key of another type."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"Redis refused a command: {reason}")
        self.reason = reason


class RequestFailedError(HeadraceError):
    """A request that ended with an error, as the worker tells it. `event` is the entry that said so.

    `result` is what there is of the answer, where the caller asked for a whole result.
    """

    def __init__(
        self, request_id: str, code: str, message: str, param: str | None = None, event: Finished | None = None
    ) -> None:
        super().__init__(f"request {request_id} failed with {code}: {message}" + (f" ({param})" if param else ""))
        self.id = request_id
        self.code = code
        self.message = message
        self.param = param
        self.event = event
        self.result: Result | None = None


class StreamError(HeadraceError):
    """A request's stream that cannot be followed, or not further. `id` is the request's."""

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(f"request {request_id}: {message}")
        self.id = request_id


class _CountError(StreamError):
    def __init__(self, request_id: str, message: str, choice: int | None, expected: int, found: int) -> None:
        super().__init__(request_id, message)
        self.choice = choice  # None: over all choices
        self.expected = expected  # tokens that the reader has
        self.found = found  # tokens that the stream says there are


class GapError(_CountError):
    """The stream says that there are more tokens (`found`) than it gave (`expected`)."""


class RewoundError(_CountError):
    """The stream says that there are fewer tokens (`found`) than it gave (`expected`), or the last entry is gone."""


class ExpiredError(StreamError):
    """The stream was there and is gone: its time is over, or it was deleted."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id, "its stream was there and is gone")


class ChangedError(StreamError):
    """The id has come to name another request: the stream's fingerprint was `expected` and now is `fp`."""

    def __init__(self, request_id: str, expected: str, fp: str) -> None:
        super().__init__(request_id, "the stream is now that of another request")
        self.expected = expected
        self.fp = fp


class MalformedEntryError(StreamError):
    """An entry that breaks the protocol: `entry_id` as on the server, `reason` in words."""

    def __init__(self, request_id: str, entry_id: str, reason: str) -> None:
        super().__init__(request_id, f"entry {entry_id} breaks the protocol: {reason}")
        self.entry_id = entry_id
        self.reason = reason


class WaitTimeoutError(StreamError, TimeoutError):
    """Nothing came within the caller's limit of `timeout_s` seconds. `cursor` goes on from here later.

    `seen` is whether the stream was there: if not, no worker has begun the request, or there is none of this id.
    `lost` says what Redis last failed with, None if it answered.
    """

    def __init__(self, request_id: str, timeout_s: float, cursor: str, *, seen: bool, lost: str | None) -> None:
        what = "nothing new came" if seen else "no worker began it, or the id is unknown,"
        why = "" if lost is None else f"; Redis does not answer as it should: {lost}"
        super().__init__(request_id, f"{what} within {timeout_s:g} s{why}")
        self.timeout_s = timeout_s
        self.cursor = cursor
        self.seen = seen
        self.lost = lost
