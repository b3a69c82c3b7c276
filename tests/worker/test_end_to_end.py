"""Jobs added by bare commands, answered by a real worker on a real server."""

from __future__ import annotations

import hashlib
import json
import time

import pytest

from headrace.clients.events import Finished, Queued, Released, Started, Tokens
from headrace.clients.job import decode_job
from headrace.engine.types import Request
from headrace.worker.text import sampling_options
from tests.support.rig import Rig
from tests.support.scripted import EOS, ByteTokenizer, ScriptedRunner, expected_output
from tests.support.worker_process import wait_until


def expected(job: dict[str, object], choice: int = 0, runner: ScriptedRunner | None = None, seed: int = 0) -> list[int]:
    """The tokens that a job gives alone."""
    decoded = decode_job(json.dumps(job).encode(), "json")
    ids = tuple(ByteTokenizer().encode(decoded.prompt or ""))
    request = Request("x", ids, sampling_options(decoded, decoded.seed if decoded.seed is not None else seed))
    runner = runner or ScriptedRunner(num_blocks=512, max_model_len=2048)
    return expected_output(runner, request, choice)[0]


@pytest.mark.parametrize("kind", ["json", "job"])
def test_a_bare_job_is_answered_in_its_own_encoding(rig: Rig, kind: str) -> None:
    job = {"prompt": "Hello", "max_tokens": 30, "seed": 7, "metadata": {"user": "ü"}}
    rig.worker()
    rig.add("my-1", job, kind=kind)
    finished = rig.wait_done("my-1")
    field = b"json" if kind == "json" else b"d"
    assert all(list(fields) == [field] for _, fields in rig.raw("my-1"))
    started = rig.started("my-1")[0]
    assert (started.attempt, started.resumed, started.seed, started.metadata) == (1, (0,), 7, {"user": "ü"})
    assert started.model.name == "scripted"
    assert rig.told("my-1")[0].token_ids == expected(job)
    assert finished.usage is not None
    assert finished.usage.prompt == 5
    assert finished.done


def test_started_names_the_job_and_the_payloads_hash(rig: Rig) -> None:
    worker = rig.worker()
    payload = '{"prompt":"Hello","max_tokens":1}'
    entry_id = rig.add("my-1", payload)
    rig.wait_done("my-1")
    started = rig.started("my-1")[0]
    assert (started.job.key, started.job.entry_id) == (rig.keys.jobs(), entry_id)
    assert started.fp == hashlib.sha256(payload.encode()).hexdigest()
    assert started.worker == worker.name
    assert started.id[0] >= int(entry_id.partition("-")[0])


def test_a_finished_job_is_acknowledged_and_deleted(rig: Rig) -> None:
    worker = rig.worker()
    rig.add("my-1", {"prompt": "Hello", "max_tokens": 3})
    rig.wait_done("my-1")
    rig.wait_empty()
    assert rig.pending() == []
    assert rig.dead() == []
    wait_until(lambda: worker.counters.acknowledged == 1)


def test_lifetimes_of_streams(rig: Rig) -> None:
    """Two leases with `started`, the queue's while it runs, the result's when it has ended."""
    rig.worker(step_time_s=0.05, lease_s=6.0, queue_ttl_s=7200.0, result_ttl_s=100.0)
    rig.add("my-1", {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True})
    out = rig.keys.out("my-1")
    wait_until(lambda: rig.client.exists(out))
    assert 0 < rig.client.pttl(out) <= 12_000
    rig.wait_tokens("my-1", 1)
    assert 7_000_000 < rig.client.pttl(out) <= 7_200_000
    rig.wait_done("my-1")
    assert 90_000 < rig.client.pttl(out) <= 100_000


def test_the_lifetime_is_renewed_with_the_first_append_after_each_renewal(rig: Rig) -> None:
    rig.worker(step_time_s=0.02, lease_s=0.9)
    rig.add("my-1", {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True})
    rig.wait_tokens("my-1", 2)
    rig.client.pexpire(rig.keys.out("my-1"), 1_000_000)  # only a test may do this
    wait_until(lambda: rig.client.pttl(rig.keys.out("my-1")) > 80_000_000)
    rig.wait_done("my-1")


def test_without_a_seed_one_is_drawn_and_told(rig: Rig) -> None:
    rig.worker()
    for name in ("a", "b"):
        rig.add(name, {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True})
    rig.wait_done("a", "b")
    seeds = [rig.started(name)[0].seed for name in ("a", "b")]
    assert seeds[0] != seeds[1]
    job = {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True}
    assert rig.told("a")[0].token_ids == expected(job, seed=seeds[0])


def test_without_streaming_only_started_and_finished_are_written(rig: Rig) -> None:
    job = {"prompt": "Hello", "max_tokens": 25, "stream": False, "seed": 1, "logprobs": 1, "ignore_eos": True}
    rig.worker()
    rig.add("my-1", job)
    rig.wait_done("my-1")
    started, finished = rig.events("my-1")
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert list(finished.token_ids) == expected(job)
    assert finished.index == 0
    assert finished.logprobs is not None
    assert len(finished.logprobs) == 25


def test_several_choices_have_a_finished_each_and_one_terminal_entry(rig: Rig) -> None:
    job = {"prompt": "Hello", "max_tokens": 40, "n": 3, "seed": 5}
    rig.worker()
    rig.add("my-1", job)
    terminal = rig.wait_done("my-1")
    finished = [event for event in rig.events("my-1") if isinstance(event, Finished)]
    assert sorted(event.choice for event in finished) == [0, 1, 2]
    assert [event.done for event in finished] == [False, False, True]
    assert [event.usage is not None for event in finished] == [False, False, True]
    lengths = [len(expected(job, choice)) for choice in range(3)]
    assert terminal.usage is not None
    assert terminal.usage.completion == sum(lengths)
    for choice in range(3):
        assert rig.told("my-1")[choice].token_ids == expected(job, choice)


def test_logprobs_and_prompt_logprobs(rig: Rig) -> None:
    rig.worker()
    rig.add("my-1", {"prompt": "Hello", "max_tokens": 4, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True})
    rig.wait_done("my-1")
    tokens = [event for event in rig.events("my-1") if isinstance(event, Tokens | Finished)]
    assert all(event.logprobs is not None and len(event.logprobs) == len(event.token_ids) for event in tokens)
    assert all(event.logprobs[0][0][0] == event.token_ids[0] for event in tokens if event.logprobs)
    with_prompt = [event.prompt_logprobs for event in tokens if event.prompt_logprobs is not None]
    assert len(with_prompt) == 1
    assert with_prompt[0] is not None
    assert with_prompt[0][0] is None
    assert len(with_prompt[0]) == 5


def test_a_stop_string_cuts_the_text_and_keeps_its_tokens(rig: Rig) -> None:
    rig.worker(script="echo")
    rig.add("cut", {"prompt": "one two three", "stop": [" thr"]})
    rig.add("kept", {"prompt": "one two three", "stop": [" thr"], "include_stop": True})
    cut, kept = rig.wait_done("cut"), rig.wait_done("kept")
    assert (cut.reason, cut.stop) == ("stop", " thr")
    assert rig.told("cut")[0].text == "one two"
    assert rig.told("kept")[0].text == "one two thr"
    assert kept.usage is not None
    assert kept.usage.completion == len("one two thr")


def test_eos_ends_with_its_id_and_is_among_the_tokens(rig: Rig) -> None:
    rig.worker(script="echo")
    rig.add("my-1", {"prompt": "ab"})
    finished = rig.wait_done("my-1")
    assert (finished.reason, finished.stop) == ("stop", EOS)
    assert rig.told("my-1")[0].token_ids == [97, 98, EOS]
    assert rig.told("my-1")[0].text == "ab"


def test_characters_come_out_whole(rig: Rig) -> None:
    rig.worker(script="echo")
    text = "né 世界 👩‍👩‍👧!"
    rig.add("my-1", {"prompt": text})
    rig.wait_done("my-1")
    texts = [event.text for event in rig.events("my-1") if isinstance(event, Tokens | Finished)]
    assert "".join(texts) == text
    assert not any("\ufffd" in each for each in texts)


def test_half_a_character_at_the_end_comes_out_as_a_replacement(rig: Rig) -> None:
    rig.worker(script="echo")
    rig.add("my-1", {"prompt": "a世", "max_tokens": 3})
    rig.wait_done("my-1")
    assert rig.told("my-1")[0].text == "a\ufffd"


def test_a_chat_and_token_ids_are_prompts_too(rig: Rig) -> None:
    rig.worker(script="echo")
    rig.add("ids", {"prompt_token_ids": [104, 105]})
    rig.add("chat", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30})
    rig.wait_done("ids", "chat")
    assert rig.told("ids")[0].text == "hi"
    assert rig.told("chat")[0].text == "user\nhi\nassistant\n"


def test_timing_adds_up(rig: Rig) -> None:
    rig.worker(step_time_s=0.01)
    rig.add("my-1", {"prompt": "Hello", "max_tokens": 10, "ignore_eos": True})
    timing = rig.wait_done("my-1").timing
    assert timing is not None
    assert timing.queued_ms is not None
    assert timing.prefill_ms is not None
    assert timing.first_token_ms == pytest.approx(timing.queued_ms + timing.prefill_ms, abs=1.0)
    assert timing.decode_ms is not None
    assert timing.decode_ms >= 90


def test_high_goes_before_normal_before_low(rig: Rig) -> None:
    """All three wait; one place: they are begun by priority."""
    for number, priority in enumerate(("low", "normal", "high", "low", "normal", "high")):
        rig.add(f"{priority}-{number}", {"prompt": "x", "max_tokens": 2, "ignore_eos": True}, priority=priority)
    rig.worker(max_num_seqs=1, step_time_s=0.003)  # so that no two begin in the same millisecond
    rig.wait_done(*rig.submitted)
    begun = sorted(rig.submitted, key=lambda each: rig.started(each)[0].id)
    assert [each.split("-")[0] for each in begun] == ["high", "high", "normal", "normal", "low", "low"]


def test_low_is_not_starved(rig: Rig) -> None:
    """Every eighth take begins with the lowest."""
    for number in range(20):
        rig.add(f"high-{number}", {"prompt": "x", "max_tokens": 1}, priority="high")
    rig.add("low", {"prompt": "x", "max_tokens": 1}, priority="low")
    rig.worker(max_num_seqs=1, step_time_s=0.003)  # so that no two begin in the same millisecond
    rig.wait_done(*rig.submitted)
    begun = sorted(rig.submitted, key=lambda each: rig.started(each)[0].id)
    assert begun.index("low") < 12


def test_no_more_is_taken_than_there_is_room_for(rig: Rig) -> None:
    rig.worker(max_num_seqs=2, step_time_s=0.01)
    for number in range(9):
        rig.add(f"my-{number}", {"prompt": "x", "max_tokens": 30, "ignore_eos": True})
    most = 0
    while not all(rig.is_done(each) for each in rig.submitted):
        most = max(most, len(rig.pending()))
        time.sleep(0.01)
    assert 2 <= most <= 4  # an acknowledgement follows its terminal entry a step later


@pytest.mark.parametrize("places", [1, 2])
def test_a_surplus_of_a_blocking_read_goes_back(rig: Rig, places: int) -> None:
    """Jobs of all three priorities at the same moment, while the worker waits: with less room, the rest goes back."""
    first = rig.worker(max_num_seqs=places, step_time_s=0.02)
    time.sleep(0.2)
    pipeline = rig.client.pipeline(transaction=True)
    for priority in ("low", "normal", "high"):
        entry = {"id": priority, "json": '{"prompt":"x","max_tokens":40,"ignore_eos":true}'}
        pipeline.xadd(rig.keys.jobs(priority), entry)
        rig.submitted.append(priority)
    pipeline.execute()
    rig.wait_tokens("high", 1)
    second = rig.worker(max_num_seqs=3)
    rig.wait_done("low", timeout_s=1.2 + 0.5)
    rig.wait_done("high", "normal")
    by_worker = {name: rig.started(name)[0].worker for name in ("high", "normal", "low")}
    assert by_worker["high"] == first.name
    assert by_worker["low"] == second.name


def test_a_burst_ends_when_nothing_is_left(rig: Rig) -> None:
    for number in range(5):
        rig.add(f"my-{number}", {"prompt": "x", "max_tokens": 5})
    worker = rig.worker(burst=True)
    assert worker.wait() == 0
    assert rig.num_jobs() == 0


def test_the_workers_hash_tells_what_it_does_and_goes_with_it(rig: Rig) -> None:
    worker = rig.worker()
    key = rig.keys.worker(worker.name)
    fields = {name.decode(): value.decode() for name, value in rig.client.hgetall(key).items()}
    assert fields["model"] == "scripted"
    assert fields["state"] == "running"
    assert fields["lease_s"] == "10"
    assert {"host", "pid", "running", "waiting", "free_kv_blocks", "tokens_per_s"} <= set(fields)
    assert 0 < rig.client.pttl(key) <= 10_000
    worker.stop()
    assert not rig.client.exists(key)


def test_the_order_of_a_client_librarys_entries(rig: Rig) -> None:
    """`queued` is there first, written by the library: `started` is built on it."""
    payload = b'{"prompt":"Hello","max_tokens":2}'
    fp = hashlib.sha256(payload).hexdigest()
    out = rig.keys.out("my-1")
    rig.client.xadd(out, {"json": json.dumps({"e": "queued", "fp": fp})}, id=f"0-{int(time.time() * 1000)}")
    rig.client.pexpire(out, 86_400_000)
    rig.worker()
    rig.add("my-1", payload, fields={"fp": fp})
    rig.wait_done("my-1")
    kinds = [type(event) for event in rig.events("my-1")]
    assert kinds == [Queued, Started, Tokens, Finished]
    assert Released not in kinds
