"""Jobs that are none, between good ones: each ends as the protocol says, and no good one is touched."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from headrace.clients.events import Finished, Started
from tests.support.rig import Rig
from tests.support.worker_process import wait_until

GOOD = {"prompt": "Hello", "max_tokens": 2}
TINY = '{"prompt":"x","max_tokens":1}'
# fields of the entry (without id), code, whether it goes to `dead`, param
MALFORMED: dict[str, tuple[dict[str, Any], str, bool, str | None]] = {
    "no-payload": ({}, "payload_undecodable", True, "job"),
    "both": ({"json": TINY, "job": msgpack.packb(GOOD)}, "payload_undecodable", True, "job"),
    "version": ({"json": TINY, "v": "2"}, "payload_undecodable", True, "v"),
    "unknown-entry-field": ({"json": TINY, "x": "1"}, "payload_undecodable", True, "x"),
    "no-json": ({"json": "{"}, "payload_undecodable", True, "json"),
    "no-msgpack": ({"job": b"\xdd\x7f\xff\xff\xff"}, "payload_undecodable", True, "job"),
    "no-utf8": ({"json": b'{"prompt":"\xff"}'}, "payload_undecodable", True, "json"),
    "trailing": ({"json": TINY + "x"}, "invalid_request", False, "json"),
    "unknown-field": ({"json": '{"prompt":"x","max_token":1}'}, "invalid_request", False, "max_token"),
    "wrong-type": ({"json": '{"prompt":"x","max_tokens":"1"}'}, "invalid_request", False, "max_tokens"),
    "out-of-range": ({"json": '{"prompt":"x","top_p":2}'}, "invalid_request", False, "top_p"),
    "nan": ({"json": '{"prompt":"x","temperature":NaN}'}, "invalid_request", False, "temperature"),
    "surrogate": ({"json": r'{"prompt":"a\ud83d"}'}, "invalid_request", False, "prompt"),
    "two-prompts": ({"json": '{"prompt":"x","prompt_token_ids":[1]}'}, "invalid_request", False, "prompt_token_ids"),
    "foreign-token": ({"json": '{"prompt_token_ids":[260]}'}, "invalid_request", False, "prompt_token_ids"),
    "foreign-stop": ({"json": '{"prompt":"x","stop_token_ids":[9999]}'}, "invalid_request", False, "stop_token_ids"),
    "empty-prompt": ({"json": '{"prompt":""}'}, "invalid_request", False, "prompt"),
    "grammar": ({"json": '{"prompt":"x","response_format":{}}'}, "unsupported", False, "response_format"),
    "too-long": ({"json": '{"prompt":"%s"}' % ("x" * 3000)}, "prompt_too_long", False, None),
}  # fmt: skip


@pytest.mark.parametrize("wait_for_worker", [True, False])
def test_malformed_jobs_between_good_ones(rig: Rig, wait_for_worker: bool) -> None:
    if wait_for_worker:
        rig.worker()
    for name, (fields, _, _, _) in MALFORMED.items():
        rig.client.xadd(rig.keys.jobs(), {"id": name, **fields})
        rig.submitted.append(name)
        rig.add(f"good-{name}", GOOD)
    if not wait_for_worker:
        rig.worker()
    rig.wait_done(*rig.submitted)
    for name, (_, code, _, param) in MALFORMED.items():
        started, finished = rig.events(name)
        assert isinstance(started, Started), name
        assert isinstance(finished, Finished), name
        assert finished.error is not None, name
        assert (finished.reason, finished.error.code, finished.error.param) == ("error", code, param), name
        assert finished.id[1] == 1, name
        assert rig.last(f"good-{name}").reason in {"stop", "length"}  # type: ignore[union-attr]
    rig.wait_empty()
    dead = {entry[b"id"].decode(): entry for entry in rig.dead()}
    assert set(dead) == {name for name, (_, _, is_dead, _) in MALFORMED.items() if is_dead}


def test_a_dead_job_keeps_its_fields_and_says_why(rig: Rig) -> None:
    worker = rig.worker()
    entry_id = rig.add("my-1", "{", fields={"v": "1"})
    rig.wait_done("my-1")
    rig.wait_empty()
    [entry] = rig.dead()
    assert list(entry.items())[:3] == [(b"id", b"my-1"), (b"json", b"{"), (b"v", b"1")]
    assert entry[b"reason"] == b"payload_undecodable"
    assert entry[b"attempts"] == b"1"
    assert entry[b"worker"].decode() == worker.name
    assert entry[b"from"].decode() == f"{rig.keys.jobs()} {entry_id}"
    assert entry[b"error"]


@pytest.mark.parametrize("bad_id", [None, "", "with space", "x" * 129, "ü"])
def test_a_job_without_a_valid_id_goes_to_dead_alone(rig: Rig, bad_id: str | None) -> None:
    worker = rig.worker()
    fields = {"json": TINY} if bad_id is None else {"id": bad_id, "json": TINY}
    rig.client.xadd(rig.keys.jobs(), fields)
    rig.add("good", GOOD)
    rig.wait_done("good")
    rig.wait_empty()
    [entry] = rig.dead()
    assert entry[b"reason"] == b"payload_undecodable"
    assert entry[b"attempts"] == b"0"
    wait_until(lambda: worker.counters.dead_lettered == 1)
    assert not [key for key in rig.client.scan_iter(f"{rig.prefix}:req:*") if b"{good}" not in key]


def test_a_field_given_twice_is_no_job(rig: Rig) -> None:
    rig.worker()
    rig.client.execute_command("XADD", rig.keys.jobs(), "*", "id", "my-1", "json", TINY, "json", TINY)
    rig.submitted.append("my-1")
    finished = rig.wait_done("my-1")
    assert finished.error is not None
    assert (finished.error.code, finished.error.param) == ("payload_undecodable", "json")


def test_an_entry_of_thousands_of_fields_goes_to_dead_too(rig: Rig) -> None:
    rig.worker()
    many = [part for number in range(6000) for part in (f"f{number}", "x")]
    rig.client.execute_command("XADD", rig.keys.jobs(), "*", "id", "my-1", *many)
    rig.submitted.append("my-1")
    rig.wait_done("my-1")
    rig.wait_empty()
    assert len(rig.dead()) == 1


def test_a_payload_over_the_limit_is_refused(rig: Rig) -> None:
    rig.worker(max_payload_bytes=1000)
    rig.add("my-1", {"prompt": "x" * 1000, "max_tokens": 1})
    finished = rig.wait_done("my-1")
    assert finished.error is not None
    assert (finished.error.code, finished.error.param) == ("invalid_request", "json")


def test_a_large_payload_is_decoded_beside_the_loop(rig: Rig) -> None:
    rig.worker()
    rig.add("my-1", {"prompt": "x", "max_tokens": 1, "metadata": {"k": "v"}, "stop": ["y" * 1000] * 60}, kind="job")
    rig.add("my-2", {"prompt_token_ids": [1] * 100_000}, kind="job")
    assert rig.wait_done("my-1").reason in {"length", "stop"}
    finished = rig.wait_done("my-2")
    assert finished.error is not None
    assert finished.error.code == "prompt_too_long"


def test_a_job_beyond_the_pool_is_refused_at_once(rig: Rig) -> None:
    from tests.support.scripted import ScriptedRunner

    rig.worker(runner=ScriptedRunner(num_blocks=4, max_model_len=2048))
    rig.add("big", {"prompt": "x" * 50, "max_tokens": 100})
    rig.add("small", GOOD)
    finished = rig.wait_done("big")
    assert finished.error is not None
    assert finished.error.code == "kv_capacity"
    rig.wait_done("small")


def test_a_nan_ends_its_own_request_only(rig: Rig) -> None:
    from tests.support.scripted import ScriptedRunner

    rig.worker(runner=ScriptedRunner(script="echo", num_blocks=64, nan_token_id=ord("!")))
    rig.add("bad", {"prompt": "a!"})
    rig.add("good", {"prompt": "ab"})
    finished = rig.wait_done("bad")
    assert finished.error is not None
    assert finished.error.code == "numeric"
    assert rig.wait_done("good").reason == "stop"


def test_no_prompt_or_answer_is_logged(rig: Rig) -> None:
    worker = rig.worker(script="echo")
    rig.add("my-1", {"prompt": "SECRETWORD", "max_tokens": 20})
    rig.add("my-2", '{"prompt":"SECRETWORD","top_p":7}')
    rig.wait_done("my-1", "my-2")
    assert "SECRETWORD" not in repr(worker.log.lines)
    assert all(
        "request" in fields
        for _, event, fields in worker.log.lines
        if event in {"started", "finished", "ended"} and "worker" not in fields
    )
