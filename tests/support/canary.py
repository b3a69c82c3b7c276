"""The canary run: prompts that each hold a secret word, many more prefixes than blocks, a crowd, and random cancels.

    prompt   [ one of a few heads, two blocks ][ word × 3 ][ filler ][ word ]

A word is a token id that no other prompt has. Whatever of an answer comes from somebody else's blocks holds a foreign
word, or is not what the prompt gives alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.engine.engine import Engine
from headrace.engine.types import Launcher, Plan, Request, SamplingOptions

FIRST_WORD = 100
NUM_PROMPTS = 100
IN_FLIGHT = 16


@dataclass(frozen=True)
class Canary:
    """One prompt."""

    word: int
    token_ids: tuple[int, ...]


@dataclass
class Answer:
    """What one request gave."""

    canary: Canary
    token_ids: list[int] = field(default_factory=list)
    cached: int = -1  # prompt tokens that were reported as served by the cache
    begins: int = -1  # the first token that was computed for it
    ended: str | None = None


def canaries(rng: random.Random, block_size: int) -> list[Canary]:
    """The prompts."""
    heads = [[2 + (head * 31 + position * 7) % 90 for position in range(2 * block_size)] for head in range(5)]
    made: list[Canary] = []
    for number in range(NUM_PROMPTS):
        word = FIRST_WORD + number
        filler = [2 + rng.randrange(90) for _ in range(rng.randrange(block_size, 4 * block_size))]
        made.append(Canary(word, (*rng.choice(heads), word, word, word, *filler, word)))
    return made


def num_prefixes(prompts: list[Canary], block_size: int) -> int:
    """How many different prefixes of whole blocks the prompts have."""
    return len(
        {one.token_ids[:end] for one in prompts for end in range(block_size, len(one.token_ids) + 1, block_size)}
    )


def run_canaries(
    engine: Engine,
    prompts: list[Canary],
    rng: random.Random,
    *,
    options: Callable[[Canary], SamplingOptions],
    before_step: Callable[[], None],
    num_cancels: int = 60,
) -> list[Answer]:
    """Ask every prompt twice in random order, 16 at a time; cancel now and then, and ask again. Gives what ended."""
    begins: dict[str, int] = {}
    _watch_runner(engine, begins)
    waiting = [*prompts, *prompts]
    rng.shuffle(waiting)
    live: dict[str, Answer] = {}
    done: list[Answer] = []
    asked = 0
    while waiting or live:
        while waiting and len(live) < IN_FLIGHT:
            canary, name = waiting.pop(), f"{asked}"
            asked += 1
            engine.add(Request(name, canary.token_ids, options(canary)))
            live[name] = Answer(canary)
        before_step()
        for output in engine.step().outputs:
            answer = live[output.request_id]
            answer.token_ids += output.token_ids
            answer.cached, answer.begins = output.cached_tokens, begins[output.request_id]
            if output.finish is not None:
                answer.ended = output.finish.reason
                done.append(live.pop(output.request_id))
        engine.check()
        if num_cancels and live and rng.random() < 0.3:
            num_cancels -= 1
            name = rng.choice(sorted(live))
            engine.abort(name)
            waiting.insert(rng.randrange(len(waiting) + 1), live.pop(name).canary)
    assert num_cancels == 0, "more steps were expected"
    return done


def _watch_runner(engine: Engine, begins: dict[str, int]) -> None:
    """Note where the first row of each request begins."""
    runner: Any = engine.runner
    name = "launch" if isinstance(runner, Launcher) else "run"
    call = getattr(runner, name)

    def watched(plan: Plan) -> Any:
        for row in plan.rows:
            begins.setdefault(row.sequence.request_id, row.start)
        return call(plan)

    setattr(runner, name, watched)
