"""The judge of this suite sees what it is there to see: each promise broken by hand, on a stream that was whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from headrace.clients.keys import Keys
from tests.support.chaos_checker import BrokenPromiseError, judge
from tests.support.chaos_oracle import expected, expected_prompt_logprobs
from tests.support.server import Server

JOB: dict[str, Any] = {"prompt": "né", "seed": 3, "max_tokens": 12, "logprobs": 1, "prompt_logprobs": 0}
Entries = list[tuple[str, dict[str, Any]]]


def whole() -> Entries:
    """Two attempts of a request, a token an entry, nothing wrong."""
    want = expected(JOB, 3)
    assert want.logprobs is not None
    entries: Entries = []
    split = 5
    for index, token in enumerate(want.token_ids):
        if index in {0, split}:
            attempt = 2000 if index else 1000
            started = {"e": "started", "attempt": attempt // 1000, "worker": "w", "resumed": [index], "seed": 3}
            entries.append((f"{attempt}-0", {**started, "fp": "f"}))
        told = {"e": "tokens", "i": index, "t": [token], "lp": [want.logprobs[index]]}
        if index == 0:
            told["plp"] = expected_prompt_logprobs(JOB)
        number = index - split + 1 if index >= split else index + 1
        entries.append((f"{entries[-1][0].split('-')[0]}-{number}", told))
    last = entries[-1][1]
    usage = {"prompt": 3, "completion": len(want.token_ids), "cached": 0}
    last |= {"e": "finished", "x": want.text, "reason": want.reason, "usage": usage, "done": True}
    if want.stop is not None:
        last["stop"] = want.stop
    return entries


def _second_terminal(entries: Entries) -> None:
    entries.append((f"2000-{int(entries[-1][0].split('-')[1]) + 1}", entries[-1][1]))


def _renumber(entries: Entries) -> None:
    """After an entry was taken out or put in: ids without a hole."""
    counts: dict[str, int] = {}
    for index, (entry_id, event) in enumerate(entries):
        attempt = entry_id.split("-")[0]
        entries[index] = (f"{attempt}-{counts.get(attempt, 0)}", event)
        counts[attempt] = counts.get(attempt, 0) + 1


def _without(index: int, *, hole: bool = False) -> Callable[[Entries], None]:
    def change(entries: Entries) -> None:
        del entries[index]
        if not hole:
            _renumber(entries)

    return change


def _with(index: int, **fields: Any) -> Callable[[Entries], None]:
    return lambda entries: entries[index][1].update(fields)


def _twice(entries: Entries) -> None:
    entries.insert(3, entries[2])
    _renumber(entries)


STREAMS: dict[str, tuple[Callable[[Entries], None], str]] = {
    "a token missing": (_without(3), "I1 index"),
    "a token twice": (_twice, "I1 index"),
    "an entry missing": (_without(3, hole=True), "I8"),
    "the wrong token": (_with(3, t=[1]), "is not what"),
    "resumed too late": (_with(6, resumed=[6]), "I1 attempt"),
    "the attempt's number": (_with(6, attempt=1), "I3 attempt"),
    "another seed": (_with(6, seed=4), "the seed changes"),
    "another payload": (_with(6, fp="0"), "fingerprint"),
    "no end": (_with(-1, e="tokens"), "I2 no terminal"),
    "two ends": (_second_terminal, "I2"),
    "usage": (_with(-1, usage={"prompt": 3, "completion": 11, "cached": 0}), "I9"),
    "text": (_with(-1, x="other"), "I4"),
    "a log-probability": (_with(2, lp=[[[1, -2.0]]]), "log-probabilities"),
    "log-probabilities left out": (lambda entries: entries[2][1].pop("lp"), "log-probabilities"),
    "prompt's log-probabilities twice": (_with(7, plp=[None]), "plp"),
}


def _write(client: redis.Redis, keys: Keys, entries: Entries) -> None:
    for entry_id, event in entries:
        client.xadd(keys.out("job"), {"json": json.dumps(event)}, id=entry_id)
    client.expire(keys.out("job"), 60)


@pytest.fixture
def client(server: Server, prefix: str) -> Any:
    with server.client() as made:
        yield made
        made.delete(*made.keys(f"{prefix}:*"))


def test_a_whole_stream_passes(client: redis.Redis, prefix: str) -> None:
    _write(client, Keys(prefix, "default"), whole())
    assert judge(client, prefix, {"job": JOB}).num_attempts == 2


@pytest.mark.parametrize("what", STREAMS)
def test_a_broken_stream_does_not(client: redis.Redis, prefix: str, what: str) -> None:
    change, said = STREAMS[what]
    entries = whole()
    change(entries)
    _write(client, Keys(prefix, "default"), entries)
    with pytest.raises(BrokenPromiseError, match=said):
        judge(client, prefix, {"job": JOB})


def _no_ttl(client: redis.Redis, keys: Keys) -> None:
    client.persist(keys.out("job"))


def _job_left(client: redis.Redis, keys: Keys) -> None:
    client.xadd(keys.jobs("low"), {"id": "job", "json": "{}"})


def _pending_left(client: redis.Redis, keys: Keys) -> None:
    client.xgroup_create(keys.jobs(), "workers", "0", mkstream=True)
    entry_id = client.xadd(keys.jobs(), {"id": "job", "json": "{}"})
    client.xreadgroup("workers", "w", {keys.jobs(): ">"})
    client.xdel(keys.jobs(), entry_id)


def _flag_left(client: redis.Redis, keys: Keys) -> None:
    client.set(keys.cancel("job"), "1", ex=60)


def _dead_by_mistake(client: redis.Redis, keys: Keys) -> None:
    client.xadd(keys.dead, {"id": "job", "reason": "attempts_exhausted"})


def _stream_missing(client: redis.Redis, keys: Keys) -> None:
    client.delete(keys.out("job"))
    client.xgroup_create(keys.jobs(), "workers", "0", mkstream=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_no_ttl, "I5"),
        (_job_left, "I7"),
        (_pending_left, "I7"),
        (_flag_left, "left behind"),
        (_dead_by_mistake, "is dead"),
        (_stream_missing, "I6"),
    ],
)
def test_a_queue_left_untidy_does_not(
    client: redis.Redis, prefix: str, change: Callable[[redis.Redis, Keys], None], said: str
) -> None:
    keys = Keys(prefix, "default")
    _write(client, keys, whole())
    change(client, keys)
    with pytest.raises(BrokenPromiseError, match=said):
        judge(client, prefix, {"job": JOB})


def test_giving_up_without_three_charged_attempts_is_seen(client: redis.Redis, prefix: str) -> None:
    entries = whole()[:2]
    error = {"code": "attempts_exhausted", "message": "."}
    usage = {"prompt": 0, "completion": 1, "cached": 0}
    entries += [
        ("2000-0", {"e": "started", "attempt": 2, "worker": "w", "resumed": [1], "seed": 3, "fp": "f"}),
        ("2000-1", {"e": "finished", "reason": "error", "error": error, "usage": usage, "done": True}),
    ]
    _write(client, Keys(prefix, "default"), entries)
    with pytest.raises(BrokenPromiseError, match="I10"):
        judge(client, prefix, {})
