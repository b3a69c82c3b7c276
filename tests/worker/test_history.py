"""Reading a request's stream at begin."""

from __future__ import annotations

import json

import pytest

from headrace.clients.errors import MalformedEntryError
from headrace.worker.history import read_history

STARTED = {
    "e": "started", "attempt": 1, "worker": "w", "job": "p:{q}:jobs 5-0", "resumed": [0], "seed": 3, "fp": "a" * 64,
    "model": {"name": "m", "fingerprint": "f"},
}  # fmt: skip


def entries(*events: tuple[str, dict[str, object]]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    return [(entry_id.encode(), {b"json": json.dumps(event).encode()}) for entry_id, event in events]


def test_no_stream() -> None:
    history = read_history([], "my-1")
    assert (history.newest_id, history.fp, history.attempts, history.newest_ms) == (b"", None, (), 0)


def test_attempts_choices_and_what_they_settled() -> None:
    history = read_history(
        entries(
            ("0-9", {"e": "queued", "fp": "b" * 64}),
            ("10-0", STARTED),
            ("10-1", {"e": "tokens", "i": 0, "t": [1, 2], "x": "ab"}),
            ("10-2", {"e": "tokens", "i": 0, "t": [3], "c": 1, "x": "c"}),
            ("10-3", {"e": "released"}),
            ("20-0", {**STARTED, "attempt": 2, "job": "p:{q}:jobs:low 7-1", "seed": 4}),
            ("20-1", {"e": "unheard of", "t": [9]}),
            ("20-2", {"e": "finished", "i": 2, "t": [5], "x": "d", "reason": "stop", "stop": 5}),
        ),
        "my-1",
    )
    assert history.fp == "b" * 64
    assert history.newest_id == b"20-2"
    assert history.newest_ms == 20
    one, two = history.attempts
    assert (one.attempt_ms, one.num_settled, one.released, one.seed) == (10, 3, True, 3)
    assert (two.attempt_ms, two.num_settled, two.released, two.seed) == (20, 1, False, 4)
    assert (two.job.key, two.job.entry_id) == ("p:{q}:jobs:low", "7-1")
    assert (history.choice(0).token_ids, history.choice(0).text) == ((1, 2, 5), "abd")
    assert history.choice(0).finished is not None
    assert history.choice(1).token_ids == (3,)
    assert history.choice(1).finished is None
    assert history.choice(7).token_ids == ()
    assert history.num_settled == 4
    assert history.terminal is None


def test_the_terminal_entry_and_the_prompts_log_probabilities() -> None:
    history = read_history(
        entries(
            ("10-0", STARTED),
            ("10-1", {"e": "tokens", "i": 0, "t": [1], "plp": [None, [[1, -0.5]]]}),
            ("10-2", {"e": "finished", "reason": "length", "done": True}),
        ),
        "my-1",
    )
    assert history.has_prompt_logprobs
    assert history.terminal is not None
    assert history.terminal.reason == "length"


def test_garbage_is_said_to_be_garbage() -> None:
    with pytest.raises(MalformedEntryError):
        read_history([(b"1-0", {b"d": b"\xc1"})], "my-1")
