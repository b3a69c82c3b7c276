"""The answer to one request as it grows: engine outputs in, payloads of stream entries out.

It counts tokens, detokenises, finds stop strings, keeps the order of `finished` entries and knows which one is
terminal. It neither sends nor knows ids of entries, nor when what it holds back is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..clients.entries import to_map, tokens_map
from ..clients.events import ErrorInfo, Finished, Reason, Timing, TokenLogprobs, Usage
from ..clients.payload import Kind, pack
from ..engine.choice_text import ChoiceText
from ..engine.types import ChoiceOutput, Finish

_NOT_SENT = (0, 0)  # an event's id is the entry's, and not part of its payload


@dataclass(slots=True)
class Times:
    """When things happened, in ms on the server's clock."""

    queued_at_ms: int
    scheduled_at_ms: float | None = None
    first_token_at_ms: float | None = None

    def timing(self, now_ms: float) -> Timing:
        """The `timing` of a request that ends now."""

        def span(start: float | None, end: float | None) -> float | None:
            return None if start is None or end is None else round(max(end - start, 0.0), 1)

        first = self.first_token_at_ms
        return Timing(
            queued_ms=span(self.queued_at_ms, self.scheduled_at_ms),
            prefill_ms=span(self.scheduled_at_ms, first),
            first_token_ms=span(self.queued_at_ms, first),
            decode_ms=span(first, now_ms if first is not None else None),
        )


@dataclass(slots=True)
class AnswerChoice:
    """One choice."""

    text: ChoiceText | None = None  # None where nothing can be decoded: a job that was not understood
    num_tokens: int = 0  # settled ones counted
    ended: bool = False  # its `finished` is written
    fed: bool = False  # the engine has given something of it in this attempt
    # What is kept back: until `finished` where the answer is not streamed, else until it is taken.
    kept_ids: list[int] = field(default_factory=list[int])
    kept_texts: list[str] = field(default_factory=list[str])
    kept_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])


class Fed(NamedTuple):
    """What one engine output has become."""

    payload: bytes | None = None  # an entry to write; None: nothing, or kept back
    num_new: int = 0  # tokens in it
    finish: Finish | None = None  # the choice has ended
    stop_found: bool = False  # by a stop string, of which the engine does not know yet


_NOTHING = Fed()


@dataclass(slots=True)
class Answer:
    """All choices of one request in one attempt."""

    kind: Kind
    stream: bool
    with_logprobs: bool
    choices: list[AnswerChoice]
    times: Times
    holds_back: bool = False  # streamed, but tokens after a choice's first are kept until `take_held`
    num_prompt_tokens: int = 0
    prompt_logprobs_due: bool = False  # asked for, and not published yet
    cached: int | None = None  # prompt tokens from the prefix cache; None before the first output
    kept_prompt_logprobs: Sequence[TokenLogprobs | None] | None = None

    num_open: int = field(init=False)  # choices without `finished`

    def __post_init__(self) -> None:
        self.num_open = sum(not choice.ended for choice in self.choices)

    def feed(self, output: ChoiceOutput, now_ms: float) -> Fed:
        """Take an engine output of this request; `now_ms` is the server's clock."""
        choice = self.choices[output.choice]
        if choice.ended or choice.text is None:
            return _NOTHING
        first = not choice.fed
        if first:
            self._first_of(choice, output, now_ms)
        before, token_ids, logprobs, finish = choice.num_tokens, output.token_ids, output.logprobs, output.finish
        text, stop, stop_index = choice.text.feed(token_ids)
        if stop is not None and stop_index is not None:
            token_ids = token_ids[: stop_index - before]
            logprobs = logprobs[: len(token_ids)]
            finish = Finish("stop", stop=stop)
        num_new = len(token_ids)
        choice.num_tokens = before + num_new
        if finish is None and self.stream and num_new and (first or not self.holds_back):  # nearly always
            return Fed(self._tokens(output.choice, before, token_ids, text, logprobs), num_new)
        self._keep(choice, token_ids, text, logprobs)
        if finish is None:
            return _NOTHING
        self._keep(choice, (), choice.text.end(), ())
        error = None if finish.error is None else ErrorInfo(finish.error, finish.message)
        num_new = len(choice.kept_ids)
        payload = self._finished(output.choice, finish.reason, now_ms, stop=finish.stop, error=error)
        return Fed(payload, num_new, finish, stop is not None and output.finish is None)

    def _first_of(self, choice: AnswerChoice, output: ChoiceOutput, now_ms: float) -> None:
        """Take what an engine output says only, or says already, when it is a choice's first."""
        choice.fed = True
        if self.cached is None or output.cached_tokens < self.cached:
            # Choices beyond the first may be served from what the first has just computed, which is no saving.
            self.cached = output.cached_tokens
        if self.times.first_token_at_ms is None and output.token_ids:
            self.times.first_token_at_ms = now_ms
        if output.prompt_logprobs is not None and self.prompt_logprobs_due:
            self.kept_prompt_logprobs, self.prompt_logprobs_due = output.prompt_logprobs, False

    def take_held(self) -> list[tuple[bytes, int]]:
        """What has been held back of a streamed answer: for each choice that has something, an entry and its tokens."""
        taken: list[tuple[bytes, int]] = []
        for index, choice in enumerate(self.choices if self.stream else ()):
            if kept_ids := choice.kept_ids:
                first, text = choice.num_tokens - len(kept_ids), "".join(choice.kept_texts)
                payload = self._tokens(index, first, kept_ids, text, choice.kept_logprobs)
                taken.append((payload, len(kept_ids)))
                choice.kept_ids, choice.kept_texts, choice.kept_logprobs = [], [], []
        return taken

    def close(self, choice: int, reason: Reason, now_ms: float, stop: int | str | None = None) -> bytes:
        """End one choice without further tokens: its `finished`, with the text that was held back."""
        return self._close(choice, reason, now_ms, stop, None)

    def close_all(self, reason: Reason, now_ms: float, error: ErrorInfo | None = None) -> list[bytes]:
        """End every open choice, in order; the last one's `finished` is terminal."""
        open_ones = [index for index, choice in enumerate(self.choices) if not choice.ended]
        # Every choice has its `finished`, and none is terminal: no worker writes that, but it must not stay open.
        return [self._close(index, reason, now_ms, None, error) for index in open_ones or [len(self.choices) - 1]]

    def _close(
        self, index: int, reason: Reason, now_ms: float, stop: int | str | None, error: ErrorInfo | None
    ) -> bytes:
        choice = self.choices[index]
        if choice.text is not None and not choice.ended and (text := choice.text.end()):
            choice.kept_texts.append(text)
        return self._finished(index, reason, now_ms, stop=stop, error=error)

    def _keep(self, choice: AnswerChoice, token_ids: Sequence[int], text: str, logprobs: Sequence[Any]) -> None:
        choice.kept_ids += token_ids
        choice.kept_logprobs += logprobs
        if text:
            choice.kept_texts.append(text)

    def _take_prompt_logprobs(self) -> Sequence[TokenLogprobs | None] | None:
        kept, self.kept_prompt_logprobs = self.kept_prompt_logprobs, None
        return kept

    def _tokens(
        self, index: int, first: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> bytes:
        lp = logprobs if self.with_logprobs else None
        plp = None if self.kept_prompt_logprobs is None else self._take_prompt_logprobs()
        return pack(tokens_map(first, token_ids, text, index, lp, plp), self.kind)

    def _finished(
        self, index: int, reason: Reason, now_ms: float, *, stop: int | str | None, error: ErrorInfo | None
    ) -> bytes:
        choice = self.choices[index]
        self.num_open -= not choice.ended
        choice.ended = True
        done = self.num_open == 0
        kept_ids, text = choice.kept_ids, "".join(choice.kept_texts)
        prompt_logprobs = self._take_prompt_logprobs()
        has_chunk = bool(kept_ids or text or prompt_logprobs is not None)
        event = Finished(
            id=_NOT_SENT,
            reason=reason,
            stop=stop,
            done=done,
            usage=self._usage() if done else None,
            error=error,
            timing=self.times.timing(now_ms) if done and self.times.scheduled_at_ms is not None else None,
            index=choice.num_tokens - len(kept_ids) if has_chunk else None,
            token_ids=tuple(kept_ids),
            text=text,
            choice=index,
            logprobs=tuple(choice.kept_logprobs) if has_chunk and self.with_logprobs else None,
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
        )
        choice.kept_ids, choice.kept_texts, choice.kept_logprobs = [], [], []
        return pack(to_map(event), self.kind)

    def _usage(self) -> Usage:
        completion = sum(choice.num_tokens for choice in self.choices)
        return Usage(self.num_prompt_tokens, completion, self.cached or 0)
