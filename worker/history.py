"""What a request's stream says of the attempts so far: read once at begin, in one pass over its entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..clients.entries import decode, parse_id
from ..clients.events import EntryId, Event, Finished, JobRef, Queued, Released, Started, Tokens

RawEntry = tuple[bytes, dict[bytes, bytes]]  # id and fields, as the server gives them


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """One earlier attempt."""

    attempt_ms: int  # the A of its ids
    job: JobRef
    seed: int
    fingerprint: str  # of the model
    num_settled: int = 0  # tokens that it has published, over all choices
    released: bool = False


@dataclass(frozen=True, slots=True)
class PastChoice:
    """What earlier attempts have published of one choice."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finished: Finished | None = None


@dataclass(frozen=True, slots=True)
class History:
    """A request's stream. Empty fields where there is no stream."""

    newest_id: bytes = b""
    fp: str | None = None  # of the first entry, in hex
    attempts: tuple[PastAttempt, ...] = ()
    choices: dict[int, PastChoice] = field(default_factory=dict[int, PastChoice])
    terminal: Finished | None = None
    has_prompt_logprobs: bool = False  # they were published

    @property
    def newest_ms(self) -> int:
        """The A of the newest entry, 0 without one."""
        return parse_id(self.newest_id)[0] if self.newest_id else 0

    @property
    def num_settled(self) -> int:
        """Tokens published, over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def choice(self, index: int) -> PastChoice:
        """What is published of a choice, nothing for one that has no entry."""
        return self.choices.get(index, PastChoice())


@dataclass(slots=True)
class _Attempt:
    started: Started
    num_settled: int = 0
    released: bool = False


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list[int])
    texts: list[str] = field(default_factory=list[str])
    finished: Finished | None = None


class _Reader:
    def __init__(self) -> None:
        self.fp: str | None = None
        self.attempts: list[_Attempt] = []
        self.choices: dict[int, _Choice] = {}
        self.terminal: Finished | None = None
        self.has_prompt_logprobs = False

    def take(self, event: Event | None) -> None:
        """Go on by one entry; kinds that this version does not know are skipped."""
        match event:
            case Queued():
                self.fp = self.fp or event.fp
            case Started():
                self.fp = self.fp or event.fp
                self.attempts.append(_Attempt(event))
            case Tokens():
                self._chunk(event.choice, event.token_ids, event.text)
                self.has_prompt_logprobs |= event.prompt_logprobs is not None
            case Finished():
                self._chunk(event.choice, event.token_ids, event.text).finished = event
                self.has_prompt_logprobs |= event.prompt_logprobs is not None
                if event.done:
                    self.terminal = event
            case Released():
                if self.attempts:
                    self.attempts[-1].released = True
            case None:
                pass

    def _chunk(self, index: int, token_ids: Sequence[int], text: str) -> _Choice:
        choice = self.choices.setdefault(index, _Choice())
        choice.token_ids.extend(token_ids)
        if text:
            choice.texts.append(text)
        if self.attempts:
            self.attempts[-1].num_settled += len(token_ids)
        return choice


def read_history(entries: Sequence[RawEntry], request_id: str) -> History:
    """The history in a stream's entries, all of them in order. Raises MalformedEntryError for what is no entry."""
    reader = _Reader()
    for entry_id, fields in entries:
        reader.take(decode(entry_id, fields, request_id))
    return History(
        newest_id=entries[-1][0] if entries else b"",
        fp=reader.fp,
        attempts=tuple(_attempt(each) for each in reader.attempts),
        choices={
            index: PastChoice(tuple(each.token_ids), "".join(each.texts), each.finished)
            for index, each in reader.choices.items()
        },
        terminal=reader.terminal,
        has_prompt_logprobs=reader.has_prompt_logprobs,
    )


def _attempt(each: _Attempt) -> PastAttempt:
    at: EntryId = each.started.id
    return PastAttempt(
        attempt_ms=at[0],
        job=each.started.job,
        seed=each.started.seed,
        fingerprint=each.started.model.fingerprint,
        num_settled=each.num_settled,
        released=each.released,
    )
