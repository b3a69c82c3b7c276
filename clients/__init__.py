"""The client of Headrace: queue prompts, follow their tokens, and the types that clients and workers share.

from headrace.clients import Client

with Client("redis://localhost:6379") as client:
    with client.submit("The sky is", max_tokens=20).stream() as stream:
        for event in stream:
            ...
"""

from .aio import AsyncClient, AsyncHandle, AsyncStream
from .client import Client, Handle, Stream
from .errors import (
    ChangedError,
    ConfigError,
    ConflictError,
    ExpiredError,
    GapError,
    HeadraceError,
    InvalidEntryError,
    InvalidJobError,
    MalformedEntryError,
    PayloadError,
    QueueFullError,
    RequestFailedError,
    RewoundError,
    ServerError,
    StreamError,
    UnavailableError,
    WaitTimeoutError,
)
from .events import (
    EntryId,
    ErrorInfo,
    Event,
    Finished,
    JobRef,
    ModelRef,
    Queued,
    Reason,
    Released,
    Started,
    Timing,
    TokenLogprobs,
    Tokens,
    Usage,
)
from .keys import Keys, Priority
from .reader import Reader
from .results import ChoiceResult, Result
from .steps import CancelOutcome, Policy
from .submission import Format, Options

__all__ = [
    "AsyncClient",
    "AsyncHandle",
    "AsyncStream",
    "CancelOutcome",
    "ChangedError",
    "ChoiceResult",
    "Client",
    "ConfigError",
    "ConflictError",
    "EntryId",
    "ErrorInfo",
    "Event",
    "ExpiredError",
    "Finished",
    "Format",
    "GapError",
    "Handle",
    "HeadraceError",
    "InvalidEntryError",
    "InvalidJobError",
    "JobRef",
    "Keys",
    "MalformedEntryError",
    "ModelRef",
    "Options",
    "PayloadError",
    "Policy",
    "Priority",
    "QueueFullError",
    "Queued",
    "Reader",
    "Reason",
    "Released",
    "RequestFailedError",
    "Result",
    "RewoundError",
    "ServerError",
    "Started",
    "Stream",
    "StreamError",
    "Timing",
    "TokenLogprobs",
    "Tokens",
    "UnavailableError",
    "Usage",
    "WaitTimeoutError",
]
