"""The judge of the chaos suite: reads every key raw, decodes by itself, and holds the protocol's promises against it.

Nothing of the project's own readers is used here: a fault that both sides share would not show. `I1` … `I10` are the
invariants of docs/protocol.md; what else is checked has a name of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import redis

from tests.support.chaos_oracle import Alternatives, Expected, expected, expected_prompt_logprobs, prompt_of, text_of

GROUP = "workers"
MAX_ATTEMPTS = 3


class BrokenPromiseError(AssertionError):
    """Something was lost, doubled, or left behind; the message says what."""


@dataclass
class ToldChoice:
    """What a stream tells of one choice."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[Alternatives] = field(default_factory=list[Alternatives])
    reason: str | None = None
    stop: int | str | None = None


@dataclass
class ToldAttempt:
    """What a stream tells of one attempt."""

    at_ms: int
    worker: str
    num_tokens: int = 0
    released: bool = False


@dataclass
class Report:
    """What a stream tells, all checks of I1, I2, I3 and I9 passed."""

    choices: dict[int, ToldChoice] = field(default_factory=dict[int, ToldChoice])
    attempts: list[ToldAttempt] = field(default_factory=list[ToldAttempt])
    end: dict[str, Any] | None = None  # the terminal entry
    seed: int = 0
    fp: str | None = None
    prompt_logprobs: list[list[Any]] = field(default_factory=list[list[Any]])

    @property
    def num_tokens(self) -> int:
        """Over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    @property
    def error_code(self) -> str | None:
        """Of the terminal entry."""
        return ((self.end or {}).get("error") or {}).get("code")

    @property
    def num_charged(self) -> int:
        """Attempts before the last that count against the greatest number: no token and not released, or the eighth."""
        charged = in_a_row = 0
        for attempt in self.attempts[:-1]:
            in_a_row = 0 if attempt.released else in_a_row + 1
            charged += not attempt.released and (attempt.num_tokens == 0 or in_a_row >= 8)
        return charged


def decode_raw(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    """One entry of a request's stream."""
    if list(fields) == [b"json"]:
        return dict(json.loads(fields[b"json"]))
    require(list(fields) == [b"d"], f"an entry has the fields {list(fields)}")
    return dict(msgpack.unpackb(fields[b"d"], strict_map_key=False))


def require(holds: object, what: str) -> None:
    """Raise BrokenPromiseError unless it holds."""
    if not holds:
        raise BrokenPromiseError(what)


def read_report(entries: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> Report:
    """Go through a stream and check what can be seen in it alone. Raises BrokenPromiseError."""
    report, place = Report(), (0, 0)
    for number, (entry_id, fields) in enumerate(entries):
        before, place = place, (int(entry_id.partition(b"-")[0]), int(entry_id.partition(b"-")[2]))
        event = decode_raw(fields)
        require(report.end is None, f"I2 {event} stands behind the terminal entry")
        kind = event["e"]
        if kind == "queued":
            require(number == 0 and place[0] == 0, f"queued at {entry_id!r} is not the first entry")
        elif kind == "started":
            _check_started(report, event, before, place)
        elif report.attempts:
            require(place == (before[0], before[1] + 1), f"I8 {entry_id!r} does not follow {before}")
            require(not report.attempts[-1].released, f"{event} stands behind released")
        else:
            require(kind == "finished" and event["reason"] == "cancelled", f"{event} before any attempt")
        if "fp" in event:
            require(report.fp in {None, event["fp"]}, "the fingerprint of the payload changes")
            report.fp = event["fp"]
        if kind in {"tokens", "finished"}:
            _take_chunk(report, event)
        elif kind == "released":
            report.attempts[-1].released = True
    return report


def _check_started(report: Report, event: dict[str, Any], before: tuple[int, int], place: tuple[int, int]) -> None:
    require(place[1] == 0 and place[0] > before[0], f"I3 an attempt begins at {place} behind {before}")
    require(event["attempt"] == len(report.attempts) + 1, f"I3 attempt {event['attempt']} is the wrong number")
    for choice, resumed in enumerate(event["resumed"]):
        have = len(report.choices[choice].token_ids) if choice in report.choices else 0
        require(resumed == have, f"I1 attempt {event['attempt']} goes on behind {resumed} tokens, there are {have}")
    require(not report.attempts or event["seed"] == report.seed, "the seed changes")
    report.seed = event["seed"]
    report.attempts.append(ToldAttempt(place[0], event["worker"]))


def _take_chunk(report: Report, event: dict[str, Any]) -> None:
    choice = report.choices.setdefault(event.get("c", 0), ToldChoice())
    require(choice.reason is None, f"I2 {event} stands behind the end of its choice")
    ids = event.get("t", [])
    if ids or event["e"] == "tokens":
        require(event["i"] == len(choice.token_ids), f"I1 index {event['i']} behind {len(choice.token_ids)} tokens")
    choice.token_ids += ids
    choice.text += event.get("x", "")
    choice.logprobs += event.get("lp") or []
    require("lp" not in event or len(event["lp"]) == len(ids), f"lp does not fit t in {event}")
    if "plp" in event:
        report.prompt_logprobs.append(event["plp"])
    if report.attempts:
        report.attempts[-1].num_tokens += len(ids)
    if event["e"] == "finished":
        choice.reason, choice.stop = event["reason"], event.get("stop")
        require(event.get("done") in {None, True}, f"done is {event.get('done')}")
        if event.get("done"):
            report.end = event
            told = event["usage"]["completion"]
            require(told == report.num_tokens, f"I9 usage says {told}, there are {report.num_tokens} tokens")
        else:
            require("usage" not in event, "usage on an entry that is not terminal")


def check_answer(name: str, report: Report, job: Mapping[str, Any]) -> None:
    """I4, and that an ended request says what an undisturbed one says, as far as it came."""
    end = report.end
    if end is None:
        return
    whole = end["reason"] in {"stop", "length"}
    for choice in range(job.get("n", 1)):
        told = report.choices.get(choice, ToldChoice())
        told_all = whole or told.reason in {"stop", "length"}
        want = expected(job, report.seed, choice)
        _check_choice(f"{name} choice {choice}", told, want, told_all)
        if not told_all and told.reason is not None:
            require(told.text == text_of(told.token_ids), f"I4 {name}: {told.text!r} is not what its ids say")
    if whole:
        want_prompt = expected_prompt_logprobs(job)
        got = report.prompt_logprobs
        require(got == ([] if want_prompt is None else [want_prompt]), f"{name}: plp is {got}, not {want_prompt}")
        told_length = end["usage"]["prompt"]
        require(told_length == len(prompt_of(job)), f"I9 {name}: usage says a prompt of {told_length}")


def _check_choice(name: str, told: ToldChoice, want: Expected, told_all: bool) -> None:
    num = len(told.token_ids)
    require(
        told.token_ids == want.token_ids[:num], f"{name}: {told.token_ids} is not what {want.token_ids} begins with"
    )
    if want.logprobs is not None:
        require(told.logprobs == want.logprobs[:num], f"{name}: other log-probabilities than undisturbed")
    if told_all:
        require(num == len(want.token_ids), f"I1 {name}: {num} tokens of {len(want.token_ids)}")
        require(told.text == want.text, f"I4 {name}: {told.text!r} is not {want.text!r}")
        require((told.reason, told.stop) == (want.reason, want.stop), f"{name}: ended by {told.reason} {told.stop}")


@dataclass
class Judgement:
    """What was found under a prefix: one report per stream."""

    reports: dict[str, Report]
    dead: list[dict[bytes, bytes]]

    @property
    def reasons(self) -> Counter[str]:
        """How often each end."""
        return Counter(str(report.end["reason"]) for report in self.reports.values() if report.end is not None)

    @property
    def errors(self) -> dict[str, dict[str, Any]]:
        """By request id, where one ended with an error."""
        ends = {name: report.end for name, report in self.reports.items() if report.end is not None}
        return {name: end["error"] for name, end in ends.items() if "error" in end}

    @property
    def num_attempts(self) -> int:
        """Over all streams."""
        return sum(len(report.attempts) for report in self.reports.values())


def judge(
    client: redis.Redis,
    prefix: str,
    jobs: Mapping[str, Mapping[str, Any]],
    *,
    may_be_gone: bool = False,
    excused: Collection[str] = (),
    max_attempts: int = MAX_ATTEMPTS,
) -> Judgement:
    """Check everything under a prefix, when all has come to rest: every job has its end and nothing is left behind.

    `jobs`: what was asked for, by request id. `may_be_gone`: keys were deleted on the way, so streams may be missing.
    `excused`: requests that need not have ended, since a server has lost them.
    """
    keys = [key.decode() for key in client.scan_iter(match=f"{prefix}:*", count=1000)]
    streams = {key[len(prefix) + 6 : -5]: key for key in keys if key.endswith("}:out")}
    reports = {}
    for name, key in streams.items():
        try:
            reports[name] = read_report(client.xrange(key))
            require(reports[name].end is not None or name in excused, "I2 no terminal entry")
            if name in jobs:
                check_answer(name, reports[name], jobs[name])
            gave_up = reports[name].error_code == "attempts_exhausted"
            charged = reports[name].num_charged
            require(gave_up == (charged >= max_attempts), f"I10 {charged} attempts are charged, gave up: {gave_up}")
        except BrokenPromiseError as error:
            raise BrokenPromiseError(f"{name}: {error}\n{_shown(client, key)}") from error
    missing = [] if may_be_gone else sorted(set(jobs) - set(reports) - set(excused))
    require(not missing, f"I6 {len(missing)} requests have no stream: {missing[:5]}")
    _check_left_over(client, keys, streams)
    dead = [fields for key in keys if key.endswith(":dead") for _, fields in client.xrange(key)]
    for entry in dead:
        code = reports[entry[b"id"].decode()].error_code
        require(code is not None and code.encode() == entry[b"reason"], f"{entry} is dead, its stream ends with {code}")
    return Judgement(reports, dead)


def _check_left_over(client: redis.Redis, keys: list[str], streams: Mapping[str, str]) -> None:
    for key in keys:
        if key.endswith((":jobs", ":jobs:high", ":jobs:low")):
            require(client.xlen(key) == 0, f"I7 {key} still holds {client.xrange(key, count=3)}")
            for group in client.xinfo_groups(key):
                require(group["pending"] == 0, f"I7 {key} has {group['pending']} pending entries")
        elif not key.endswith(":dead"):
            require(client.pttl(key) != -1, f"I5 {key} has no time to live")
            of_a_stream = key.endswith(":cancel") and f"{key.removesuffix('cancel')}out" in streams.values()
            require(not of_a_stream, f"{key} was left behind by a request that has ended")


def _shown(client: redis.Redis, key: str) -> str:
    return "\n".join(f"  {entry_id.decode()} {decode_raw(fields)}" for entry_id, fields in client.xrange(key))
