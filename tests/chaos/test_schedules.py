"""Whole workers, producers, cancellers and readers in random order on a real server, any reply lost at any command.

Everything happens in this process, command by command, as a seed says (see `tests/support/chaos_stage.py`); a failure
names its seed, and `--chaos-seed` brings it back.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import redis

from tests.support.chaos_links import staged
from tests.support.chaos_load import Job
from tests.support.chaos_play import Play, Script, make_play
from tests.support.server import Server

KINDS = {
    "lost replies": Script(lose=0.02, most_losses=15),
    "kills": Script(kills=3, workers=2, longest=20),
    "freezes": Script(sleeps=4, workers=3, longest=30),
    "drains": Script(stops=4, longest=30),
    "cancels": Script(cancels=6, lose=0.01, longest=30),
    "groups destroyed": Script(destroy_groups=0.01, flush_scripts=0.01, longest=20),
    "everything": Script(
        jobs=4, workers=3, longest=25, lose=0.01, kills=2, sleeps=2, stops=1, cancels=3, flush_scripts=0.005
    ),
}


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


@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules(
    server: Server,
    client: redis.Redis,
    prefix: str,
    seed: int,
    kind: str,
    progress: Callable[[str], None],
    is_full: bool,
) -> None:
    seen: Counter[str] = Counter()
    for number in range(200 if is_full else 12):
        play = perform(make_play(server, client, f"{prefix}-{number}", KINDS[kind], f"{seed} {number}"), number)
        seen.update(turns=play.stage.turn, commands=play.stage.num_commands, losses=play.stage.num_losses)
        seen.update({f"counter {name}": count for name, count in play.counters().items()})
    progress(str(dict(seen)))
    assert seen["commands"] > 0


# One request with everything that is easily broken: several choices, log-probabilities, a stop string, half characters.
CHOICES: Job = {"prompt": "né 世界", "seed": 17, "n": 2, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 14}
STOPPED: Job = {"prompt": "one two", "seed": 5, "stop": ["three four", "END"], "max_tokens": 30, "min_tokens": 4}


def _one_fault(server: Server, client: redis.Redis, prefix: str, at: int, kind: str) -> Play:
    play = make_play(server, client, prefix, Script(jobs=2, workers=1), 0)
    for request_id, job in (("job-0", CHOICES), ("job-1", STOPPED)):
        play.add_job(request_id, job)
    if kind == "kill":
        play.stage.kill_at = at
    else:
        play.stage.loss_at = (at, kind == "command lost")
    return perform(play, f"{kind} at command {at}")


@pytest.mark.parametrize("kind", ["reply lost", "command lost", "kill"])
def test_one_fault_at_every_command(
    server: Server,
    client: redis.Redis,
    prefix: str,
    chance: random.Random,
    kind: str,
    progress: Callable[[str], None],
    is_full: bool,
) -> None:
    undisturbed = _one_fault(server, client, prefix, -1, kind)
    num_commands = undisturbed.stage.num_commands
    places = range(num_commands) if is_full else sorted(chance.sample(range(num_commands), 20))
    for at in places:
        _one_fault(server, client, f"{prefix}-{at}", at, kind)
    progress(f"{num_commands} commands, {len(places)} of them tried")
    assert num_commands > 60
