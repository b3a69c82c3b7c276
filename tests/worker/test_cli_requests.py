"""`headrace submit`, `tail` and `cancel`, answered by a worker that a test plays by hand."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Callable

from headrace.worker.exit_codes import ExitCode
from tests.support.command import Outcome, Scribe, Spawn
from tests.support.server import Server


def test_submit_shows_the_text(call: Callable[..., Outcome], place: list[str], answering: Callable[..., None]) -> None:
    answering(["물", "레", "방아 🌊"])
    assert call("submit", "hello", *place) == Outcome(0, "물레방아 🌊\n", "")


def test_submit_sends_what_its_flags_say(
    call: Callable[..., Outcome], place: list[str], scribe: Scribe, answering: Callable[..., None]
) -> None:
    answering(["x"])
    flags = [
        "--system",
        "S",
        "--max-tokens",
        "7",
        "--temperature",
        "0.5",
        "--top-p",
        "0.9",
        "--top-k",
        "5",
        "--seed",
        "3",
    ]
    call("submit", "U", *flags, "--stop", "a", "--stop", "b", "--id", "my-1", "--priority", "high", *place)
    assert scribe.job == {
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 3,
        "stop": ["a", "b"],
        "n": 1,
        "stream": True,
    }
    assert scribe.entry.startswith(scribe.keys.jobs("high"))


def test_submit_reads_standard_input(
    spawn: Spawn, call: Callable[..., Outcome], place: list[str], scribe: Scribe, answering: Callable[..., None]
) -> None:
    answering(["x"])
    process = spawn("submit", "-", *place, stdin=subprocess.PIPE)
    out, err = process.communicate("물\nwater\n", timeout=20)
    assert (process.returncode, out, err) == (0, "x\n", "")
    assert scribe.job["prompt"] == "물\nwater\n"


def test_a_terminal_without_emoji_gets_question_marks(
    spawn: Spawn, place: list[str], answering: Callable[..., None]
) -> None:
    answering(["a🌊b"])
    process = spawn("submit", "hello", *place, variables={"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "a?b\n", "")


def test_submit_as_json_gives_every_entry(
    call: Callable[..., Outcome], place: list[str], answering: Callable[..., None]
) -> None:
    answering(["a", "b"])
    outcome = call("submit", "hello", "--json", "--id", "json-1", *place)
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    assert [line["e"] for line in lines] == ["queued", "started", "tokens", "tokens", "finished"]
    assert [line.get("x") for line in lines[2:4]] == ["a", "b"]
    # a kept cursor goes on behind its entry
    rest = call("tail", "json-1", "--json", "--cursor", lines[2]["cursor"], *place)
    assert [json.loads(line)["e"] for line in rest.out.splitlines()] == ["tokens", "finished"]
    end = call("tail", "json-1", "--timeout", "2s", "--cursor", lines[-1]["cursor"], *place)
    assert end == Outcome(0, "", "")


def test_submit_without_streaming(
    call: Callable[..., Outcome], place: list[str], scribe: Scribe, answering: Callable[..., None]
) -> None:
    answering(["a", "b"])
    outcome = call("submit", "hello", "--no-stream", "--json", "--id", "whole-1", *place)
    document = json.loads(outcome.out)
    assert outcome.out.count("\n") == 1
    assert (document["id"], document["text"], document["reason"]) == ("whole-1", "ab", "stop")
    assert document["usage"] == {"prompt": 1, "completion": 2, "cached": 0}
    assert scribe.job["stream"] is False


def test_submit_and_go(call: Callable[..., Outcome], place: list[str], scribe: Scribe) -> None:
    request_id = call("submit", "hello", "--detach", *place).out.strip()
    assert scribe.answer(["late"]) == request_id
    assert call("tail", request_id, *place).out == "late\n"


def test_a_failed_request_is_one_line(
    call: Callable[..., Outcome], place: list[str], answering: Callable[..., None]
) -> None:
    answering(["a"], reason="error", error={"code": "numeric", "message": "not a number"})
    outcome = call("submit", "hello", "--id", "bad-1", *place)
    assert outcome.code == ExitCode.REQUEST_FAILED
    assert outcome.out == "a\n"
    assert outcome.line == "headrace submit: request bad-1 failed with numeric: not a number"


def test_a_request_that_ran_out_of_time(
    call: Callable[..., Outcome], place: list[str], answering: Callable[..., None]
) -> None:
    answering(["a"], reason="deadline")
    outcome = call("submit", "hello", *place)
    assert outcome.code == ExitCode.REQUEST_FAILED
    assert "ran out of time" in outcome.line


def test_cancel_before_any_worker(call: Callable[..., Outcome], place: list[str]) -> None:
    call("submit", "hello", "--detach", "--id", "c-1", *place)
    assert call("cancel", "c-1", *place) == Outcome(0, "c-1: cancelled\n", "")
    assert call("cancel", "c-1", *place) == Outcome(0, "c-1: already finished\n", "")
    outcome = call("tail", "c-1", *place)
    assert outcome.code == ExitCode.REQUEST_CANCELLED
    assert outcome.line == "headrace tail: request c-1 was cancelled"


def test_cancel_of_a_running_request(
    call: Callable[..., Outcome], place: list[str], scribe: Scribe, server: Server
) -> None:
    call("submit", "hello", "--detach", "--id", "c-2", *place)
    scribe.begin(scribe.take())
    assert call("cancel", "c-2", *place) == Outcome(0, "c-2: requested\n", "")
    assert server.client().exists(scribe.keys.cancel("c-2"))


def test_cancel_of_an_unknown_request(call: Callable[..., Outcome], place: list[str]) -> None:
    outcome = call("cancel", "nobody", *place)
    assert outcome.code == ExitCode.NO_ANSWER
    assert "nobody" in outcome.line


def test_tail_of_an_unknown_request_gives_up(call: Callable[..., Outcome], place: list[str]) -> None:
    outcome = call("tail", "nobody", "--timeout", "200ms", *place)
    assert outcome.code == ExitCode.NO_ANSWER
    assert "nobody" in outcome.line and "0.2 s" in outcome.line


def test_the_same_id_with_another_prompt_is_refused(call: Callable[..., Outcome], place: list[str]) -> None:
    assert call("submit", "one", "--detach", "--id", "same", *place).code == 0
    assert call("submit", "one", "--detach", "--id", "same", *place).code == 0
    outcome = call("submit", "two", "--detach", "--id", "same", *place)
    assert outcome.code == ExitCode.REFUSED
    assert "same" in outcome.line


def test_an_interrupt_leaves_the_request_running(spawn: Spawn, place: list[str], scribe: Scribe) -> None:
    process = spawn("submit", "hello", "--id", "on-1", *place)
    request_id = scribe.take()
    scribe.begin(request_id)
    scribe.write(request_id, 1, e="tokens", i=0, t=[0], x="half")
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 10)[0]  # shown before there is a line's end
    assert os.read(process.stdout.fileno(), 100) == b"half"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "headrace tail on-1" in Outcome(process.returncode, out, err).line
    assert not scribe.client.exists(scribe.keys.cancel("on-1"))


def test_a_reader_that_goes_away_ends_it_quietly(spawn: Spawn, place: list[str], scribe: Scribe) -> None:
    process = spawn("submit", "hello", *place)
    request_id = scribe.take()
    scribe.begin(request_id)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    for i in range(3):
        scribe.write(request_id, i + 1, e="tokens", i=i, t=[i], x="more ")
    assert process.wait(10) == ExitCode.BROKEN_PIPE
    assert process.stderr.read() == ""
