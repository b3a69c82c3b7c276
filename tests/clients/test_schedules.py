"""Random schedules: producers, cancellers and a worker on one request, command by command, with replies lost at random.

The steps of the client are generators, so that a schedule can interleave them between any two commands. What they
yield is carried out on a real server; the reply may then be lost, or the command before it is carried out.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import redis

from headrace.clients import CancelOutcome, Finished, Keys, Policy, Queued
from headrace.clients.entries import decode
from headrace.clients.steps import Command, LostReplyError, Pause, RunScript, cancel, submit
from headrace.clients.submission import build
from tests.clients.hand_worker import HandWorker

JOB = build({"prompt": "Hello"}, "a")
POLICY = Policy(give_up_s=60.0)


class Party:
    """One call, carried out step by step."""

    def __init__(self, steps: Generator[Any, Any, Any], raw: redis.Redis, chance: random.Random) -> None:
        self._steps, self._raw, self._chance = steps, raw, chance
        self._step = next(steps)
        self.result: Any = None
        self.over = False
        self.lost = 0

    def advance(self, reply: Any = None) -> None:
        """The next command; `reply` takes the place of the server's, an error that of any."""
        try:
            if isinstance(reply, LostReplyError):
                self._step = self._steps.throw(reply)
            else:
                self._step = self._answer() if reply is None else self._steps.send(reply)
        except StopIteration as stop:
            self.result, self.over = stop.value, True

    @property
    def next_command(self) -> str:
        if isinstance(self._step, Command):
            return str(self._step.args[0])
        return self._step.script.name if isinstance(self._step, RunScript) else "pause"

    def until(self, name: str) -> None:
        while self.next_command != name:
            self.advance()

    def _answer(self) -> Any:
        if isinstance(self._step, Pause):
            return self._steps.send(None)
        lose = self._chance.random() if self.lost < 4 else 1.0
        if lose < 0.12:  # before the server sees it
            self.lost += 1
            return self._steps.throw(LostReplyError("lost on the way there"))
        reply = self._carry_out(self._step)
        if lose < 0.24:
            self.lost += 1
            return self._steps.throw(LostReplyError("lost on the way back"))
        return self._steps.send(reply)

    def _carry_out(self, step: Command | RunScript) -> Any:
        if isinstance(step, Command):
            return self._raw.execute_command(*step.args)
        return self._raw.eval(step.script.source, len(step.keys), *step.keys, *step.args)


@pytest.mark.parametrize(
    ("policy", "commands"),
    [
        (POLICY, ["TIME", "append", "XADD"]),
        (Policy(max_backlog=9), ["XRANGE", "XLEN", "XLEN", "XLEN", "TIME", "append", "XADD"]),
    ],
)
def test_a_new_request_takes_no_more_commands_than_it_must(
    raw: redis.Redis, keys: Keys, policy: Policy, commands: list[str]
) -> None:
    call = Party(submit(JOB, keys, policy), raw, random.Random(0))
    call.lost = 99
    seen: list[str] = []
    while not call.over:
        seen.append(call.next_command)
        call.advance()
    assert call.result
    assert seen == commands


@pytest.fixture
def two(raw: redis.Redis, keys: Keys) -> tuple[Party, Party]:
    """Two calls for the same request, of which none loses a reply by chance."""
    calls = [Party(submit(JOB, keys, POLICY), raw, random.Random(0)) for _ in range(2)]
    for call in calls:
        call.lost = 99
        call.until("TIME")
    return calls[0], calls[1]


def test_in_the_same_millisecond_only_one_call_is_the_one(
    two: tuple[Party, Party], raw: redis.Redis, keys: Keys
) -> None:
    now = raw.time()
    for call in two:
        call.advance(now)
        assert call.next_command == "append"
    for call in two:
        while not call.over:
            call.advance()
    assert [call.result for call in two] == [True, False]
    assert raw.xlen(keys.jobs()) == 1


def test_what_a_call_has_tried_in_vain_is_not_what_is_there(
    two: tuple[Party, Party], raw: redis.Redis, keys: Keys
) -> None:
    first, second = two
    first.until("append")
    first.advance(LostReplyError("lost on the way there"))
    seconds, micros = raw.time()
    second.advance((seconds + 1, micros))  # for it, it is another millisecond
    while not second.over:
        second.advance()
    while not first.over:
        first.advance()
    assert (first.result, second.result) == (False, True)
    assert raw.xlen(keys.jobs()) == 1


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_in_whatever_order_there_is_one_request_with_one_end(
    raw: redis.Redis, keys: Keys, seed: int
) -> None:
    chance = random.Random(seed)
    policies = [POLICY, replace(POLICY, max_backlog=9)]  # one of them looks before it writes
    producers = [Party(submit(JOB, keys, chance.choice(policies)), raw, chance) for _ in range(chance.randint(1, 3))]
    cancellers = [Party(cancel("a", keys, POLICY), raw, chance) for _ in range(chance.randint(0, 3))]
    begun: HandWorker | None = None
    while parties := [party for party in producers + cancellers if not party.over]:
        chance.choice(parties).advance()
        if begun is None and chance.random() < 0.1 and raw.xlen(keys.jobs()):
            begun = _begin(raw, keys)
    begun = begun or _begin(raw, keys)  # the worker's turn, if the request has not ended
    assert begun is None or raw.xlen(keys.jobs()) >= 1  # a job there must be then
    if begun is not None:
        begun.finish("cancelled" if begun.flagged else "stop")
    entries = raw.xrange(keys.out("a"))
    events = [decode(*entry) for entry in entries]
    assert isinstance(events[0], Queued)
    assert sum(isinstance(event, Queued) for event in events) == 1
    ends = [event for event in events if isinstance(event, Finished) and event.done]
    assert ends == [events[-1]]
    outcomes = [party.result for party in cancellers]
    if CancelOutcome.CANCELLED in outcomes:
        assert begun is None
        assert [event.reason for event in ends] == ["cancelled"]
    if begun is not None:
        assert CancelOutcome.CANCELLED not in outcomes
        assert not raw.exists(keys.cancel("a"))
    assert any(party.result for party in producers)
    jobs = {tuple(sorted(fields.items())) for _, fields in raw.xrange(keys.jobs())}
    assert len(jobs) <= 1


def _begin(raw: redis.Redis, keys: Keys) -> HandWorker | None:
    """Begin as a worker would: not if the stream has ended."""
    worker = HandWorker(raw, keys, "a")
    newest = decode(*raw.xrevrange(keys.out("a"), count=1)[0])
    if isinstance(newest, Finished):
        return None
    worker.start()
    return worker
