"""Whole workers, producers, cancellers and readers in random order on a real server, any reply lost at any command.

Everything happens in this process, command by command, as a seed says (see `tests/support/chaos_stage.py`); a failure
names its seed, and `--chaos-seed` brings it back.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from tests.support.chaos_links import staged
from tests.support.chaos_load import Job
from tests.support.chaos_oracle import Expected, expected
from tests.support.chaos_play import Play, Script, make_play
from tests.support.server import Server

SCRIPTS = {
    "lost replies": Script(lose=0.02, most_losses=15),
    "kills": Script(kills=3, workers=2, longest=20),
    "freezes": Script(sleeps=4, workers=3, longest=30),
    "drains": Script(stops=4, longest=30),
    "cancels": Script(cancels=6, lose=0.01, longest=30),
    "groups destroyed": Script(destroy_groups=0.01, flush_scripts=0.01, longest=20),
    "failovers": Script(failovers=4, kills=1, longest=30),
    "everything": Script(
        jobs=4, workers=3, longest=25, lose=0.01, kills=2, sleeps=2, stops=1, cancels=3, flush_scripts=0.005
    ),
    # A token every few ms: some chunks come out by themselves, some are held when their worker is hit.
    "chunks held back": Script(
        jobs=4, workers=3, longest=40, lose=0.01, kills=3, sleeps=2, stops=2, cancels=3, flush_interval_s=0.02
    ),
}

FAULTS = ("reply lost", "command lost", "kill")
_CORE = {"everything", "reply lost"}


def _core(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Those that the short size runs on every kind of server."""
    return (pytest.mark.core,) if name in _CORE else ()


@pytest.fixture
def client(server: Server) -> Iterator[redis.Redis]:
    made = server.client()
    yield made
    made.close()


def perform(play: Play, what: object) -> Play:
    """Run a play to its end and judge it; what fails says which it was."""
    with staged(play.stage):
        try:
            play.run()
            play.judge()
        except BaseException as error:
            error.add_note(f"in the schedule of {what}")
            raise
        finally:
            play.close()
    keys = list(play.client.scan_iter(match=f"{play.prefix}:*", count=1000))
    play.client.delete(*keys)
    return play


@pytest.mark.parametrize("script", [pytest.param(name, marks=_core(name)) for name in SCRIPTS])
def test_random_schedules(
    server: Server,
    client: redis.Redis,
    prefix: str,
    seed: int,
    script: str,
    progress: Callable[[str], None],
    tally: Counter[str],
    amount: Callable[..., Any],
) -> None:
    seen: Counter[str] = Counter()
    for number in range(amount(100, 8, 3)):
        play = perform(make_play(server, client, f"{prefix}-{number}", SCRIPTS[script], f"{seed} {number}"), number)
        tally.update(play.tally)
        seen.update(turns=play.stage.turn, commands=play.stage.num_commands, losses=play.stage.num_losses)
        seen.update({f"counter {name}": count for name, count in play.counters().items()})
    progress(str(dict(seen)))
    assert seen["commands"] > 0


# Two requests with everything that is easily broken: choices of which one ends long before the other, their
# log-probabilities, a stop string, characters in halves.
CHOICES: Job = {"prompt": "né 世界", "n": 2, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 16}
STOPPED: Job = {"prompt": "one two", "stop": ["three four", "END"], "max_tokens": 30, "min_tokens": 4}


def _seeded(job: Job, suits: Callable[[list[Expected]], bool]) -> Job:
    """The job with the first seed whose answer suits."""
    answers = ((seed, [expected(job, seed, choice) for choice in range(job.get("n", 1))]) for seed in range(10_000))
    return {**job, "seed": next(seed for seed, answer in answers if suits(answer))}


def _hard_jobs() -> list[Job]:
    return [
        _seeded(CHOICES, lambda answer: len(answer[0].token_ids) < 6 and len(answer[1].token_ids) > 12),
        _seeded(STOPPED, lambda answer: answer[0].stop == "three four" and len(answer[0].token_ids) > 14),
    ]


def _one_fault(server: Server, client: redis.Redis, prefix: str, at: int, fault: str) -> Play:
    play = make_play(server, client, prefix, Script(jobs=2, workers=1), 0)
    for number, job in enumerate(_hard_jobs()):
        play.add_job(f"job-{number}", job)
    if fault == "kill":
        play.stage.kill_at = at
    else:
        play.stage.loss_at = (at, fault == "command lost")
    return perform(play, f"{fault} at command {at}")


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=_core(name)) for name in ("reply lost", "command lost", "kill")]
)
def test_one_fault_at_every_command(
    server: Server,
    client: redis.Redis,
    prefix: str,
    chance: random.Random,
    fault: str,
    progress: Callable[[str], None],
    tally: Counter[str],
    amount: Callable[..., Any],
) -> None:
    undisturbed = _one_fault(server, client, prefix, -1, fault)
    num_commands = undisturbed.stage.num_commands
    # In the short size few of those that only load scripts, which come first.
    late = range(40, num_commands)
    places = amount(range(num_commands), [3, 30, *chance.sample(late, 12)], [3, *chance.sample(late, 3)])
    for at in places:
        play = _one_fault(server, client, f"{prefix}-{at}", at, fault)
        tally.update(play.tally)
        tally["kills"] += fault == "kill"
    progress(f"{num_commands} commands, {len(places)} of them tried")
    assert num_commands > 60
