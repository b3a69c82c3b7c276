"""The flags of the commands that speak to a queue from outside: submit, tail, cancel, status, health, dead …."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from .flags import Flag, FlagSettings
from .options import HOUR_S, WorkerSettings
from .settings import DURATION_RULE, Count, Seconds, Texts
from .settings_server import ServerFlags

_WORKER = WorkerSettings()

AsJson = Annotated[
    bool,
    Field(validation_alias="HEADRACE_JSON"),
    Flag("one JSON object a line", "true or false", panel="Output", name="json"),
]

NewId = Annotated[
    Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:\-]{1,128}$")] | None,
    Flag("id of the request", "1 to 128 characters of A–Z a–z 0–9 _ . : -", metavar="ID", panel="Job", default="new"),
]


class SubmitFlags(ServerFlags):
    """`headrace submit`."""

    chat: Annotated[bool, Flag("the prompt is a user's message of a chat", "true or false", panel="Job")] = False
    system: Annotated[
        str | None, Flag("system message of the chat; implies --chat", "text", metavar="TEXT", panel="Job")
    ] = None
    max_tokens: Annotated[Count, Flag("longest output", "an integer from 1", panel="Job")] = 256
    temperature: Annotated[float, Field(ge=0), Flag("0 is greedy", "a number from 0", panel="Job")] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), Flag("nucleus sampling", "a number above 0, at most 1", panel="Job")] = (
        1.0
    )
    top_k: Annotated[int, Field(ge=0), Flag("sample from so many; 0 is off", "an integer from 0", panel="Job")] = 0
    seed: Annotated[
        Annotated[int, Field(ge=0, le=2**63 - 1)] | None,
        Flag("seed of the noise", "an integer from 0 to 2⁶³−1", panel="Job", default="drawn at random"),
    ] = None
    stop: Annotated[Texts, Flag("end before this text; may be repeated", "text", metavar="TEXT", panel="Job")] = ()
    n: Annotated[int, Field(ge=1, le=16), Flag("choices", "an integer from 1 to 16", panel="Job")] = 1
    id: NewId = None
    priority: Annotated[
        Literal["high", "normal", "low"], Flag("which line to stand in", "high, normal or low", panel="Job")
    ] = "normal"
    stream: Annotated[bool, Flag("show the text as it comes", "true or false", panel="Output")] = True
    detach: Annotated[bool, Flag("print the id and do not wait", "true or false", panel="Output")] = False
    as_json: AsJson = False
    timeout: Annotated[
        Seconds | None,
        Field(gt=0),
        Flag("longest wait between two entries", DURATION_RULE, metavar="DURATION", panel="Output", default="none"),
    ] = None


class TailFlags(ServerFlags):
    """`headrace tail`."""

    cursor: Annotated[
        str | None,
        Flag("go on behind this entry", "a cursor as --json prints it", metavar="CURSOR", default="the beginning"),
    ] = None
    as_json: AsJson = False
    timeout: Annotated[
        Seconds | None,
        Field(gt=0),
        Flag("longest wait between two entries", DURATION_RULE, metavar="DURATION", panel="Output"),
    ] = 30.0


class CancelFlags(ServerFlags):
    """`headrace cancel`."""


class StatusFlags(ServerFlags):
    """`headrace status`."""

    as_json: AsJson = False


class HealthFlags(ServerFlags):
    """`headrace health`."""

    any_host: Annotated[bool, Flag("a worker on whatever machine will do, not only on this one", "true or false")] = (
        False
    )


class DoctorFlags(ServerFlags):
    """`headrace doctor`."""

    lease: Annotated[
        Seconds,
        Field(gt=0),
        Flag("lease of the queue's workers, where none is there to say it", DURATION_RULE, metavar="DURATION"),
    ] = _WORKER.lease_s
    queue_ttl: Annotated[
        Seconds,
        Field(gt=HOUR_S),
        Flag("life of a request that has not ended, as the workers have it", f"{DURATION_RULE}, above 1h", "DURATION"),
    ] = _WORKER.queue_ttl_s
    max_keys: Annotated[Count, Flag("keys that the server walks by to find ours", "an integer from 1")] = 20_000
    max_time: Annotated[
        Seconds, Field(gt=0), Flag("longest time for looking at keys", DURATION_RULE, metavar="DURATION")
    ] = 5.0
    as_json: AsJson = False


class DeadLsFlags(ServerFlags):
    """`headrace dead ls`."""

    limit: Annotated[Count, Flag("most entries to show", "an integer from 1", panel="Output")] = 100
    as_json: AsJson = False


class DeadShowFlags(ServerFlags):
    """`headrace dead show`."""

    with_payload: Annotated[bool, Flag("show what the job holds, its prompt too", "true or false", panel="Output")] = (
        False
    )
    as_json: AsJson = False


class DeadRetryFlags(ServerFlags):
    """`headrace dead retry`."""

    all: Annotated[bool, Flag("every entry of the queue", "true or false")] = False
    id: NewId = None
    as_json: AsJson = False


class DeadPurgeFlags(ServerFlags):
    """`headrace dead purge`."""

    all: Annotated[bool, Flag("every entry of the queue", "true or false")] = False
    older_than: Annotated[
        Seconds | None,
        Flag("with --all, only what was given up so long ago", DURATION_RULE, metavar="DURATION"),
    ] = None
    yes: Annotated[bool, Flag("do not ask", "true or false")] = False


CLIENT_FLAGS: tuple[type[FlagSettings], ...] = (
    *(SubmitFlags, TailFlags, CancelFlags, StatusFlags, HealthFlags, DoctorFlags),
    *(DeadLsFlags, DeadShowFlags, DeadRetryFlags, DeadPurgeFlags),
)
