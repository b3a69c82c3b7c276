"""`headrace dead retry`: what has been given up is sent again as it was, and never lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from headrace.clients.keys import Keys, Priority
from headrace.worker.dead import DeadLetters
from headrace.worker.exit_codes import ExitCode
from tests.support.command import Outcome, Scribe
from tests.support.morgue import PAYLOAD, PROMPT, Morgue
from tests.support.rig import Rig
from tests.support.worker_process import WorkerProcess

Call = Callable[..., Outcome]


def limited(morgue: Morgue, *rules: str) -> list[str]:
    """Flags of a user that may do only a part of what there is to do: where that ends, a command is cut off."""
    morgue.client.execute_command("ACL", "SETUSER", "part", "reset", "on", ">pw", *rules)
    return ["--redis-url", f"redis://part:pw@127.0.0.1:{morgue.server.port}/0", *morgue.place[2:]]


@pytest.mark.parametrize("priority", ["high", "normal", "low"])
def test_retry_adds_the_very_job_under_a_new_id(call: Call, morgue: Morgue, scribe: Scribe, priority: Priority) -> None:
    payload = msgpack.packb({"max_tokens": 5, "prompt": PROMPT})  # not in the order that the library would choose
    entry_id = morgue.add("id", "old", "job", payload, priority=priority)
    outcome = call("dead", "retry", entry_id, *morgue.place)
    assert outcome.code == 0
    shown, new_id = outcome.out.split()
    assert (shown, new_id != "old", morgue.ids()) == (entry_id, True, [])
    [job] = morgue.jobs(priority)
    assert (job[b"id"].decode(), job[b"job"], job[b"v"]) == (new_id, payload, b"1")
    [(_, queued)] = morgue.client.xrange(morgue.keys.out(new_id))
    assert msgpack.unpackb(queued[b"d"]) == {"e": "queued", "fp": job[b"fp"].decode()}
    assert scribe.answer(["yes"]) == new_id
    assert call("tail", new_id, *morgue.place).out == "yes\n"


def test_retry_under_an_id_of_ones_own(call: Call, morgue: Morgue) -> None:
    entry_id = morgue.add_good()
    outcome = call("dead", "retry", entry_id, "--id", "mine", "--json", *morgue.place)
    assert json.loads(outcome.out) == {"entry": entry_id, "was": "old", "id": "mine"}
    assert [job[b"id"] for job in morgue.jobs()] == [b"mine"]


def test_the_id_of_a_request_that_has_been_is_refused(call: Call, morgue: Morgue) -> None:
    """The same payload under its old id would be the old request, and its job would be gone."""
    call("dead", "retry", morgue.add_good(), "--id", "mine", *morgue.place)
    entry_id = morgue.add_good()
    outcome = call("dead", "retry", entry_id, "--id", "mine", *morgue.place)
    assert (outcome.code, morgue.ids()) == (ExitCode.REFUSED, [entry_id])
    assert "mine exists already" in outcome.line


GARBAGE: dict[str, tuple[Any, ...]] = {
    "no JSON": ("id", "old", "json", "{"),
    "no id": ("json", PAYLOAD),
    "given twice": ("id", "old", "json", PAYLOAD, "json", PAYLOAD),
    "unknown field": ("id", "old", "json", PAYLOAD, "x", "y"),
    "against the rules": ("id", "old", "json", '{"prompt":"x","n":0}'),
}


@pytest.mark.parametrize("pairs", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_shown_and_purged_but_not_retried(call: Call, morgue: Morgue, pairs: tuple[Any, ...]) -> None:
    good, bad = morgue.add_good(), morgue.add(*pairs)
    assert "no: " in call("dead", "show", bad, *morgue.place).out
    outcome = call("dead", "retry", good, bad, *morgue.place)
    assert (outcome.code, morgue.ids(), morgue.jobs()) == (ExitCode.REFUSED, [good, bad], [])
    assert f"dead entry {bad} holds no job to retry: " in outcome.line
    outcome = call("dead", "retry", "--all", *morgue.place)
    assert (outcome.code, morgue.ids(), len(morgue.jobs())) == (ExitCode.REFUSED, [bad], 1)
    assert "1 dead entry without a job to retry left" in outcome.line
    assert call("dead", "purge", bad, "--yes", *morgue.place).out == "purged: 1\n"
    assert morgue.ids() == []


def test_an_entry_that_no_worker_wrote(call: Call, morgue: Morgue) -> None:
    entry_id = morgue.client.xadd(morgue.keys.dead, {"id": "old", "json": PAYLOAD}).decode()
    assert call("dead", "ls", *morgue.place).code == 0
    outcome = call("dead", "retry", entry_id, *morgue.place)
    assert (outcome.code, morgue.ids()) == (ExitCode.REFUSED, [entry_id])


def test_cut_off_after_the_job_is_in(call: Call, own_morgue: Morgue, keys: Keys) -> None:
    """The entry stays; trying again is the same request, and adds no second job once that has begun."""
    entry_id = own_morgue.add("id", "old", "job", msgpack.packb(json.loads(PAYLOAD)))
    outcome = call("dead", "retry", entry_id, *limited(own_morgue, "~*", "+@all", "-xdel"))
    assert outcome.code == ExitCode.SERVER_UNAVAILABLE and outcome.line
    assert own_morgue.ids() == [entry_id]
    new_id = Scribe(own_morgue.server, keys).answer(["yes"])
    assert call("dead", "retry", entry_id, *own_morgue.place).out == f"{entry_id} {new_id}\n"
    assert (own_morgue.ids(), len(own_morgue.jobs())) == ([], 1)


def test_cut_off_before_the_job_is_in(call: Call, own_morgue: Morgue, keys: Keys) -> None:
    """`queued` stands and no job: the entry must not go before one was added."""
    entry_id = own_morgue.add_good()
    user = limited(own_morgue, f"~{keys.prefix}:req:*", f"~{keys.dead}", "+@all")
    assert call("dead", "retry", entry_id, *user).code == ExitCode.SERVER_UNAVAILABLE
    [out] = own_morgue.client.scan_iter(f"{keys.prefix}:req:*")
    outcome = call("dead", "retry", entry_id, *own_morgue.place)
    assert (outcome.code, own_morgue.ids(), own_morgue.jobs()) == (ExitCode.REFUSED, [entry_id], [])
    assert "again in 10 s" in outcome.line
    [(queued_id, fields)] = own_morgue.client.xrange(out)
    own_morgue.client.delete(out)  # as if it had been written 11 s earlier
    own_morgue.client.xadd(out, fields, id=f"0-{int(queued_id.partition(b'-')[2]) - 11_000}")
    assert call("dead", "retry", entry_id, *own_morgue.place).code == 0
    assert (own_morgue.ids(), len(own_morgue.jobs())) == ([], 1)


def test_all_are_those_of_now(morgue: Morgue) -> None:
    """A job that is given up again at once must not be sent again for ever."""
    ids = [morgue.add_good(f"r-{number}") for number in range(20)]
    seen: list[str] = []
    for entry in DeadLetters(morgue.server.client(), morgue.keys).all_of_now():
        seen.append(entry.entry_id)
        morgue.client.xdel(morgue.keys.dead, entry.entry_id)
        if len(seen) < 100:
            morgue.add_good("again")
    assert seen == ids


def test_poison_is_retried_under_a_new_id_and_answered(
    call: Call, start_worker: Callable[..., WorkerProcess], rig: Rig
) -> None:
    rig.submit("poison", {"prompt": "x!", "max_tokens": 5})
    for _ in range(3):
        assert start_worker(rig.server, rig.prefix, lease_s=1.0, kill_token_id=33, wait=False).wait() == 70
    last = start_worker(rig.server, rig.prefix, lease_s=1.0, kill_token_id=33)
    rig.wait_done("poison")
    rig.wait_empty()
    last.stop()
    assert last.wait() == 0
    place = ["--redis-url", rig.server.url, "--prefix", rig.prefix]
    [line] = call("dead", "ls", "--json", *place).out.splitlines()
    listed = json.loads(line)
    assert (listed["request"], listed["reason"], listed["attempts"]) == ("poison", "attempts_exhausted", 4)
    outcome = call("dead", "retry", "--all", *place)
    entry_id, new_id = outcome.out.split()
    rig.submitted.append(new_id)
    assert (entry_id, rig.dead()) == (listed["entry"], [])
    start_worker(rig.server, rig.prefix, lease_s=1.0)  # mended: nothing kills it
    finished = rig.wait_done(new_id)
    assert (finished.error, rig.num_tokens(new_id) > 0) == (None, True)
    assert rig.wait_done("poison").error is not None  # that one stays as it ended
