"""A whole answer, put together from a stream's events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import RequestFailedError
from .events import ErrorInfo, Event, Finished, ModelRef, Reason, Started, Timing, TokenLogprobs, Tokens, Usage


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """One choice of an answer."""

    choice: int
    text: str
    token_ids: tuple[int, ...]  # end of sequence and stop tokens included
    reason: Reason
    stop: int | str | None  # what ended it, with reason "stop"
    error: ErrorInfo | None  # with reason "error"
    logprobs: tuple[TokenLogprobs, ...] | None  # one per token, if asked for


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a request. `text`, `token_ids`, `reason` and so on of the first choice are at hand as well."""

    id: str
    choices: tuple[ChoiceResult, ...]  # at least one, in order
    usage: Usage | None
    error: ErrorInfo | None  # of the request, or of its first choice that failed
    timing: Timing | None
    attempts: int  # how many were begun; 0 if the request was cancelled before
    seed: int | None
    model: ModelRef | None
    metadata: Mapping[str, Any] | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def reason(self) -> Reason:
        """Why the first choice ended."""
        return self.choices[0].reason


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] | None = None
    finished: Finished | None = None


class Collector:
    """Takes the events of one stream from its beginning to its end, then gives the result."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._choices: dict[int, _Choice] = {}
        self._started: Started | None = None
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._last: Finished | None = None

    def add(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Tokens | Finished):
            self._add_chunk(event)

    def result(self, *, raise_on_error: bool) -> Result:
        """The answer, once the terminal event was added.

        Raises RequestFailedError, with the answer in it, if a choice failed and `raise_on_error`.
        """
        if self._last is None:
            raise ValueError("the terminal event is still to come")
        result = self._build(self._last)
        if result.error is not None and raise_on_error:
            failure = RequestFailedError(
                self._id, result.error.code, result.error.message, result.error.param, self._last
            )
            failure.result = result
            raise failure
        return result

    def _add_chunk(self, event: Tokens | Finished) -> None:
        choice = self._choices.setdefault(event.choice, _Choice())
        choice.token_ids += event.token_ids
        choice.texts.append(event.text)
        if event.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + list(event.logprobs)
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        if isinstance(event, Finished):
            choice.finished = event
            if event.done:
                self._last = event

    def _build(self, last: Finished) -> Result:
        choices = tuple(
            _choice_result(number, choice, choice.finished or last) for number, choice in sorted(self._choices.items())
        )
        started = self._started
        return Result(
            id=self._id,
            choices=choices,
            usage=last.usage,
            error=last.error or next((choice.error for choice in choices if choice.error is not None), None),
            timing=last.timing,
            attempts=started.attempt if started else 0,
            seed=started.seed if started else None,
            model=started.model if started else None,
            metadata=started.metadata if started else None,
            prompt_logprobs=self._prompt_logprobs,
        )


def _choice_result(number: int, choice: _Choice, finished: Finished) -> ChoiceResult:
    """`finished` is the choice's own, or the terminal one, which ends every choice that is still open."""
    return ChoiceResult(
        choice=number,
        text="".join(choice.texts),
        token_ids=tuple(choice.token_ids),
        reason=finished.reason,
        stop=finished.stop,
        error=finished.error,
        logprobs=None if choice.logprobs is None else tuple(choice.logprobs),
    )
