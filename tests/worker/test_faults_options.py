"""Every field that a job may have changes something that can be seen, or is refused by its name: none is ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.clients.events import Finished, Started, Tokens
from headrace.clients.options import CHECKS
from headrace.engine.types import EngineConfig
from headrace.worker.exit_codes import ExitCode
from tests.support.checkpoints import Shape
from tests.support.command import Outcome
from tests.support.rig import Rig
from tests.support.scripted import BYTE_VOCAB_SIZE
from tests.support.torch_rig import torch_runner

CHAT = {"prompt": None, "messages": [{"role": "user", "content": "Hi"}]}
A, EOS = 97, 1
ALWAYS_A = {"logit_bias": {f"{A}": 1000.0}}
ALWAYS_EOS = {"logit_bias": {f"{EOS}": 1000.0}}
FEW = {"logit_bias": {f"{A + number}": 1000.0 for number in range(6)}, "max_tokens": 30}  # so that tokens come again
BASE: dict[str, Any] = {
    "prompt": "wheel", "seed": 5, "temperature": 0.8, "max_tokens": 12, "ignore_eos": True, "min_p": 0.0,
}  # fmt: skip
# For each field: what the job has besides, and what the field is then set to. None takes a field out.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "prompt": ({}, "stone"),
    "prompt_token_ids": ({"prompt": None, "prompt_token_ids": [9, 8]}, [9, 7]),
    "messages": (CHAT, [{"role": "user", "content": "Ho"}]),
    "tools": (CHAT, [{"type": "function", "function": {"name": "turn"}}]),
    "chat_template_kwargs": (CHAT, {"enable_thinking": False}),
    "max_tokens": ({}, 5),
    "min_tokens": ({**ALWAYS_EOS, "ignore_eos": False}, 4),
    "temperature": ({}, 3.0),
    "top_p": ({"temperature": 3.0}, 0.1),
    "top_k": ({"temperature": 3.0}, 2),
    "min_p": ({"temperature": 3.0}, 0.9),
    "repetition_penalty": ({"temperature": 0}, 3.0),
    "presence_penalty": (FEW, 2.0),
    "frequency_penalty": (FEW, -2.0),
    "logit_bias": ({}, {f"{A}": 1000.0}),
    "seed": ({}, 6),
    "stop": (ALWAYS_A, ["aaa"]),
    "stop_token_ids": (ALWAYS_A, [A]),
    "ignore_eos": (ALWAYS_EOS, False),
    "include_stop": ({**ALWAYS_A, "stop": ["aa"]}, True),
    "n": ({}, 2),
    "logprobs": ({}, 2),
    "prompt_logprobs": ({}, 0),
    "response_format": ({}, {"type": "json_object"}),
    "stream": ({}, False),
    "timeout_ms": ({}, 1),
    "metadata": ({}, {"user": "me"}),
    "cache_salt": ({"prompt": "a prompt that fills more than a whole block of the cache"}, "mine"),
    "traceparent": ({}, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
}


def seen(rig: Rig, log: list[Any], name: str) -> list[object]:
    """All that reaches a reader of a request, or an operator, but for names, ids and times."""
    told: list[object] = []
    for event in rig.events(name):
        if isinstance(event, Started):
            told.append(("started", event.resumed, event.seed, event.metadata))
        elif isinstance(event, Tokens):
            told.append((event.choice, event.token_ids, event.text, event.logprobs, event.prompt_logprobs))
        elif isinstance(event, Finished):
            told.append((event.choice, event.token_ids, event.text, event.reason, event.stop, event.error))
    for _, event, fields in log:
        if fields.get("request") == name:
            told.append((event, {key: value for key, value in fields.items() if key != "request"}))
    return told


@pytest.fixture
def model_worker(rig: Rig) -> Iterator[Callable[..., Any]]:
    """A worker on a tiny random model whose tokens are bytes."""
    shape = Shape(hidden=32, heads=2, kv_heads=1, middle=48, vocab=BYTE_VOCAB_SIZE, eos=(EOS,))
    config = EngineConfig(max_num_seqs=32, num_kv_blocks=200, max_model_len=256)

    def start(**settings: Any) -> Any:
        return rig.worker(runner=torch_runner(shape, config), **settings)  # type: ignore[arg-type]

    yield start


def test_every_field_of_a_job_changes_something(model_worker: Callable[..., Any], rig: Rig) -> None:
    assert set(CASES) == set(CHECKS), "a field without a case"
    worker = model_worker()
    for name, (more, value) in CASES.items():
        base = {**BASE, **more}
        for request_id, job in ((name, base), (f"{name}-again", base), (f"{name}-set", {**base, name: value})):
            rig.add(request_id, {key: each for key, each in job.items() if each is not None})
            rig.wait_done(request_id)  # one by one, so that what the cache serves is the same each time
    idle: list[str] = []
    for name in CASES:
        first, again, changed = (seen(rig, worker.log.lines, name + end) for end in ("", "-again", "-set"))
        assert first == again, f"without {name} two runs differ: nothing can be concluded"
        if changed == again and name != "cache_salt":
            idle.append(name)
    assert idle == [], "these do nothing"
    assert rig.last("timeout_ms-set").reason == "deadline"  # type: ignore[union-attr]
    assert rig.last("response_format-set").error.code == "unsupported"  # type: ignore[union-attr]
    assert [rig.last(f"cache_salt{end}").usage.cached for end in ("", "-again", "-set")] == [0, 48, 0]  # type: ignore[union-attr]


FORMATS = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "no such type", "pattern": "(["}}},
    {"type": "regex", "regex": "([a-z"},
    {"type": "grammar", "grammar": "root ::="},
    {"type": "who knows"},
    {},
]


def test_every_answer_format_is_refused_and_nobody_beside_it_notices(rig: Rig) -> None:
    """Two at once of each, valid or not, among others that are served."""
    rig.worker(max_num_seqs=8)
    for number, wanted in enumerate(FORMATS):
        for copy in "ab":
            rig.add(f"format-{number}{copy}", {"prompt": "Give me JSON", "response_format": wanted, "max_tokens": 9})
        rig.add(f"plain-{number}", {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True})
    rig.wait_done(*rig.submitted)
    for number in range(len(FORMATS)):
        for copy in "ab":
            error = rig.last(f"format-{number}{copy}").error  # type: ignore[union-attr]
            assert (error.code, error.param) == ("unsupported", "response_format")
        assert rig.last(f"plain-{number}").reason == "length"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name",
    ["adapter", "lora", "model", "guided_json", "best_of", "use_beam_search", "draft_tokens", "cancel_on_disconnect"],
)
def test_what_a_job_cannot_ask_for_is_refused_by_its_name(rig: Rig, name: str) -> None:
    rig.worker()
    rig.add("my-1", {"prompt": "Hello", name: "x"})
    error = rig.wait_done("my-1").error
    assert error is not None
    assert (error.code, error.param) == ("invalid_request", name)


@pytest.mark.parametrize(
    "flag",
    ["--speculative-model", "--num-speculative-tokens", "--enable-lora", "--tensor-parallel-size", "--cuda-graphs"],
)
def test_what_a_worker_cannot_do_has_no_flag(call: Callable[..., Outcome], flag: str) -> None:
    outcome = call("worker", "--model", "demo", flag, "2")
    assert outcome.code == ExitCode.USAGE
    assert f"No such option: {flag}" in outcome.line
