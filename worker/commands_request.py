"""`headrace submit`, `tail` and `cancel`: one request, through the client library."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..clients.client import Client, Handle, Stream
from ..clients.entries import to_map
from ..clients.errors import RequestFailedError
from ..clients.events import Finished, Tokens
from ..clients.results import Result
from ..clients.steps import CancelOutcome, Policy
from .command import command
from .exit_codes import CommandError, ExitCode
from .reach import check_reachable
from .settings_client import CancelFlags, SubmitFlags, TailFlags
from .settings_server import ServerFlags

_GIVE_UP_S = 10.0  # the server has just answered: whoever types a command does not wait long for it
PromptArgument = Annotated[str, typer.Argument(metavar="PROMPT", help="the prompt; - reads it from standard input")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="id of the request")]


@command(SubmitFlags)
def submit(settings: SubmitFlags, prompt: PromptArgument) -> ExitCode:
    """Send a prompt and show its text as it comes."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with _client(settings) as client:
        handle = _send(client, settings, text)
        if settings.detach:
            sys.stdout.write(_line({"id": handle.id}) if settings.as_json else f"{handle.id}\n")
            return ExitCode.OK
        return _or_leave_running(handle.id, lambda: _show(handle, settings))


@command(TailFlags)
def tail(settings: TailFlags, request_id: IdArgument) -> ExitCode:
    """Show a request's text, from its beginning or a cursor on."""
    with _client(settings) as client:
        stream = client.stream(request_id, settings.cursor or "", settings.timeout, raise_on_error=False)
        return _follow(stream, request_id, as_json=settings.as_json)


@command(CancelFlags)
def cancel(settings: CancelFlags, request_id: IdArgument) -> ExitCode:
    """Cancel a request, queued or running."""
    with _client(settings) as client:
        outcome = client.cancel(request_id)
    if outcome is CancelOutcome.UNKNOWN:
        message = f"no stream of request {request_id} is there; a job of this id that still waits will be cancelled"
        raise CommandError(message, ExitCode.NO_ANSWER)
    sys.stdout.write(f"{request_id}: {outcome.value}\n")
    return ExitCode.OK


def _client(settings: ServerFlags) -> Client:
    url = check_reachable(settings)
    return Client(url, prefix=settings.prefix, queue=settings.queue, policy=Policy(give_up_s=_GIVE_UP_S))


def _send(client: Client, settings: SubmitFlags, text: str) -> Handle:
    is_chat = settings.chat or settings.system is not None
    messages = [{"role": "system", "content": settings.system}] if settings.system is not None else []
    return client.submit(
        None if is_chat else text,
        id=settings.id,
        priority=settings.priority,
        messages=[*messages, {"role": "user", "content": text}] if is_chat else None,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed=settings.seed,
        stop=list(settings.stop) or None,
        n=settings.n,
        stream=settings.stream,
    )


def _or_leave_running(request_id: str, show: Callable[[], ExitCode]) -> ExitCode:
    """Ctrl-C ends the showing, not the request: say how to go on."""
    try:
        return show()
    except KeyboardInterrupt:
        hint = f"request {request_id} goes on: headrace tail {request_id}, or headrace cancel {request_id}"
        raise CommandError(hint, ExitCode.INTERRUPTED) from None


def _show(handle: Handle, settings: SubmitFlags) -> ExitCode:
    if settings.stream and settings.n == 1:
        stream = handle.stream("", settings.timeout, raise_on_error=False)
        return _follow(stream, handle.id, as_json=settings.as_json)
    result = handle.result(settings.timeout, raise_on_error=False)
    if settings.as_json:
        sys.stdout.write(_line(_whole(result)))
    else:
        for choice in result.choices:
            sys.stdout.write((f"[{choice.choice}] " if len(result.choices) > 1 else "") + choice.text + "\n")
    if result.error is not None:
        raise RequestFailedError(handle.id, result.error.code, result.error.message, result.error.param)
    return _code_of(result.reason, handle.id)


def _follow(stream: Stream, request_id: str, *, as_json: bool) -> ExitCode:
    """Show a stream to its end: the text as it comes, or one JSON object for each entry."""
    last: Finished | None = None
    wrote = False
    with stream:
        for event in stream:
            if as_json:
                sys.stdout.write(_line({**to_map(event), "cursor": stream.cursor}))
            elif isinstance(event, Tokens | Finished):
                sys.stdout.write(event.text)
                wrote = wrote or bool(event.text)
            sys.stdout.flush()
            if isinstance(event, Finished):
                last = event
    if wrote:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if last is None:
        return ExitCode.OK  # a cursor behind the end: nothing is left to show
    if last.error is not None:
        raise RequestFailedError(request_id, last.error.code, last.error.message, last.error.param)
    return _code_of(last.reason, request_id)


def _code_of(reason: str, request_id: str) -> ExitCode:
    if reason == "cancelled":
        raise CommandError(f"request {request_id} was cancelled", ExitCode.REQUEST_CANCELLED)
    if reason == "deadline":
        raise CommandError(f"request {request_id} ran out of time", ExitCode.REQUEST_FAILED)
    return ExitCode.OK


def _whole(result: Result) -> dict[str, Any]:
    document = asdict(result)
    return {"id": document.pop("id"), "text": result.text, "reason": result.reason, **document}


def _line(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"
