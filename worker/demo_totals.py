"""What the demo's requests came to, whether all was right, and the totals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..clients.events import Event, Finished, Reason, Started, Tokens
from .demo_prompts import DemoPrompt

REPLACEMENT = "\ufffd"  # what half a character is decoded to
CHOICE_MARK = "\n────\n"  # between the choices of one request


@dataclass(slots=True)
class Track:
    """One request on its way; changed by `take` only. Times are monotonic seconds."""

    prompt: DemoPrompt
    sent_s: float | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    texts: dict[int, str] = field(default_factory=dict[int, str])  # per choice
    token_ids: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reason: Reason | None = None
    failure: str = ""  # the request's error, or whatever else went wrong

    def take(self, event: Event, now_s: float) -> None:
        """Take the next entry of the request's stream."""
        if isinstance(event, Started):
            self.started_s = now_s
        elif isinstance(event, Tokens | Finished):
            self.texts[event.choice] = self.texts.get(event.choice, "") + event.text
            self.token_ids.setdefault(event.choice, []).extend(event.token_ids)
            if event.token_ids and self.first_token_s is None:
                self.first_token_s = now_s
        if isinstance(event, Finished) and event.done:
            self._end(event, now_s)

    def _end(self, event: Finished, now_s: float) -> None:
        self.ended_s = now_s
        self.reason = event.reason
        if event.usage is not None:
            self.prompt_tokens, self.cached_tokens = event.usage.prompt, event.usage.cached
        if event.error is not None:
            self.failure = f"{event.error.code}: {event.error.message}"

    @property
    def num_tokens(self) -> int:
        """Tokens of the output so far."""
        return sum(map(len, self.token_ids.values()))

    @property
    def text(self) -> str:
        """The text so far, one choice after the other."""
        return CHOICE_MARK.join(text for _, text in sorted(self.texts.items()))

    @property
    def problem(self) -> str:
        """What is not as it should be, in words; empty if all is."""
        if self.failure or self.reason is None:
            return self.failure or "it did not end"
        expected = ("cancelled",) if self.prompt.cancel_after is not None else ("stop", "length")
        if self.reason not in expected:
            return f"it ended with {self.reason}, not with {' or '.join(expected)}"
        if not all(text.strip() for text in self.texts.values()):
            return "its text is empty"
        # A small model may sample half a character, and then that is what must be seen; its greedy text is whole.
        if REPLACEMENT in self.text and self.prompt.options.get("temperature") == 0:
            return "its text holds half a character"
        return ""


@dataclass(frozen=True, slots=True)
class Totals:
    """The demo in numbers."""

    num_requests: int
    num_tokens: int
    wall_s: float  # from the first request to the last end
    tokens_per_s: float
    first_token_p50_s: float
    first_token_max_s: float
    hurry_first_token_s: float | None  # of the high-priority request
    prompt_tokens: int
    cached_tokens: int  # of these, served by the prefix cache
    tokens_per_step: float | None  # how full the batch was; None if the worker did not say


def totals(tracks: Sequence[Track], worker: Mapping[str, str]) -> Totals:
    """Add up requests that have all ended; `worker` is the worker's own hash."""
    begin_s = min(track.sent_s or 0.0 for track in tracks)
    wall_s = max(track.ended_s or begin_s for track in tracks) - begin_s
    num_tokens = sum(track.num_tokens for track in tracks)
    waits_s = [track.first_token_s - track.sent_s for track in tracks if track.first_token_s and track.sent_s]
    hurry = next((each for each in tracks if each.prompt.priority == "high"), None)
    return Totals(
        num_requests=len(tracks),
        num_tokens=num_tokens,
        wall_s=wall_s,
        tokens_per_s=num_tokens / wall_s if wall_s else 0.0,
        first_token_p50_s=statistics.median(waits_s) if waits_s else 0.0,
        first_token_max_s=max(waits_s, default=0.0),
        hurry_first_token_s=hurry.first_token_s - hurry.sent_s
        if hurry and hurry.first_token_s and hurry.sent_s
        else None,
        prompt_tokens=sum(track.prompt_tokens for track in tracks),
        cached_tokens=sum(track.cached_tokens for track in tracks),
        tokens_per_step=_tokens_per_step(worker),
    )


def _tokens_per_step(worker: Mapping[str, str]) -> float | None:
    """Each sequence of a step's batch gives a token, but for those whose prompt is still being computed."""
    try:
        return float(worker["tokens"]) / float(worker["step"])
    except (KeyError, ValueError, ZeroDivisionError):
        return None
