"""`headrace demo`: it runs, ends by itself, says what was not right, and leaves no process behind however it ends."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from headrace.clients.events import ErrorInfo, Event, Finished, JobRef, ModelRef, Reason, Started, Tokens, Usage
from headrace.worker.demo_prompts import DemoPrompt, demo_prompts
from headrace.worker.demo_totals import Track, totals
from headrace.worker.demo_view import LineView, PanelView, best_layout
from headrace.worker.exit_codes import ExitCode
from tests.support.command import Outcome, Spawn
from tests.support.processes import children_of, is_running, wait_until

FP = "0" * 64
STARTED = Started((9, 0), 1, "w", JobRef("jobs", "1-1"), (), 1, FP, ModelRef("demo", FP))


# --- the whole --------------------------------------------------------------------------------------------------------


def test_the_demo_runs_and_ends_by_itself(spawn: Spawn) -> None:
    process = spawn("demo", "--prompt", "The lantern")
    assert wait_until(lambda: len(children_of(process.pid)) == 2, 20)
    children = children_of(process.pid)
    out, err = process.communicate(timeout=180)
    assert (process.returncode, err) == (0, ""), out
    assert "\x1b" not in out
    prompts = demo_prompts(["The lantern"])
    assert len(prompts) >= 9
    for prompt in prompts:
        assert f"  {prompt.title}" in out
    lines = out.splitlines()
    assert sum("(cancelled, " in line for line in lines) == 1
    assert sum("(stop, " in line or "(length, " in line for line in lines) == len(prompts) - 1
    for total in ("output: ", "first token: ", "in a hurry: ", "batch: ", "prefix cache: "):
        assert any(f"s  {total}" in line for line in lines), total
    assert not any("prefix cache: 0 of" in line for line in lines)
    assert not any(map(is_running, children))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_it_is_ended_early(spawn: Spawn, how: signal.Signals, tmp_path: Path) -> None:
    process = spawn("demo", variables={"TMPDIR": str(tmp_path)})
    assert wait_until(lambda: len(children_of(process.pid)) == 2, 20)  # a server and a worker
    children = children_of(process.pid)
    process.send_signal(how)
    out, err = process.communicate(timeout=30)
    expected = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED, signal.SIGKILL: -9}[how]
    assert process.returncode == expected, err
    assert "Traceback" not in out + err
    assert wait_until(lambda: not any(map(is_running, children)), 5), children
    assert how is signal.SIGKILL or not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--server", "/no/such/server"], ExitCode.EMBEDDED_SERVER, "no such program"),
        (["--model", "/no/such/model"], ExitCode.MODEL, "/no/such/model"),
        (["--max-num-seqs", "0"], ExitCode.USAGE, "--max-num-seqs"),
    ],
)
def test_what_goes_wrong_is_one_line(spawn: Spawn, flags: list[str], code: ExitCode, words: str) -> None:
    process = spawn("demo", *flags)
    out, err = process.communicate(timeout=60)
    outcome = Outcome(process.returncode, out, err)
    assert (outcome.code, words in outcome.line) == (code, True), outcome


# --- what counts as right ---------------------------------------------------------------------------------------------


def track(*events: Event, prompt: DemoPrompt | None = None) -> Track:
    """A request that has taken these events, at seconds 1, 2, 3, …"""
    made = Track(prompt or DemoPrompt("title", "prompt", {}), sent_s=0.5)
    for number, event in enumerate(events, 1):
        made.take(event, float(number))
    return made


def finished(reason: Reason, **fields: Any) -> Finished:
    """A terminal event."""
    return Finished((9, 9), reason, done=True, **fields)


TOKENS = Tokens((9, 1), 0, (1, 2), "물 ")
HALF = Tokens((9, 1), 0, (1,), "물\ufffd")
GREEDY = DemoPrompt("title", "prompt", {"temperature": 0.0})
CANCELLED = DemoPrompt("title", "prompt", {}, cancel_after=2)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (track(STARTED, TOKENS, finished("stop")), ""),
        (track(STARTED, TOKENS, finished("length")), ""),
        (track(STARTED, TOKENS, finished("cancelled"), prompt=CANCELLED), ""),
        (track(STARTED, TOKENS, finished("stop"), prompt=CANCELLED), "it ended with stop, not with cancelled"),
        (track(STARTED, TOKENS, finished("cancelled")), "it ended with cancelled, not with stop or length"),
        (track(STARTED, TOKENS, finished("deadline")), "it ended with deadline, not with stop or length"),
        (track(STARTED, TOKENS, finished("error", error=ErrorInfo("numeric", "NaN"))), "numeric: NaN"),
        (track(STARTED, TOKENS), "it did not end"),
        (track(STARTED, finished("stop")), "its text is empty"),
        (track(STARTED, Tokens((9, 1), 0, (1,), " \n"), finished("stop")), "its text is empty"),
        (track(STARTED, HALF, finished("stop")), ""),
        (track(STARTED, HALF, finished("stop"), prompt=GREEDY), "its text holds half a character"),
    ],
)
def test_what_is_right(made: Track, problem: str) -> None:
    if not made.texts:
        made.texts[0] = ""
    assert made.problem == problem


def test_choices_are_told_apart() -> None:
    second = Tokens((9, 2), 0, (7,), "b", choice=1)
    made = track(STARTED, TOKENS, second, Finished((9, 3), "stop"), finished("stop", choice=1))
    assert (made.text, made.num_tokens) == ("물 \n────\nb", 3)
    assert made.problem == ""


def test_the_totals() -> None:
    usage = Usage(10, 2, 4)
    hurry = DemoPrompt("in a hurry", "p", {}, priority="high")
    numbers = totals(
        [
            track(STARTED, TOKENS, finished("stop", usage=usage)),
            track(TOKENS, STARTED, finished("stop", usage=usage), prompt=hurry),
        ],
        {"tokens": "30", "step": "12"},
    )
    assert (numbers.num_requests, numbers.num_tokens) == (2, 4)
    assert numbers.wall_s == 2.5
    assert numbers.tokens_per_s == pytest.approx(1.6)
    assert (numbers.first_token_p50_s, numbers.first_token_max_s) == (1.0, 1.5)
    assert numbers.hurry_first_token_s == 0.5
    assert (numbers.prompt_tokens, numbers.cached_tokens) == (20, 8)
    assert numbers.tokens_per_step == 2.5
    assert totals([track(STARTED, TOKENS, finished("stop"))], {}).tokens_per_step is None


# --- how it looks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(80, 24), (110, 32), (200, 60), (72, 20)])
def test_panels_fit_wide_characters_and_any_terminal(width: int, height: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    tracks = [Track(prompt, sent_s=0.0) for prompt in demo_prompts(["[bold]not markup[/bold]"])]
    for number, each in enumerate(tracks):
        each.texts[0] = "물레방아" * 60 * (number + 1) + "\n🚀 [i]END"
        each.token_ids[0] = [1] * number
    console.print(PanelView(console).grid(tracks))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert len(lines) <= height
    layout = best_layout(len(tracks), width, height)
    assert layout is not None
    num_full_rows = len(tracks) // layout.num_columns
    full_rows = lines[: num_full_rows * layout.panel_height]
    assert len({cell_len(line) for line in full_rows}) == 1  # borders stand one below the other
    assert max(map(cell_len, lines)) <= width
    assert sum(line.count("🚀 [i]END") for line in lines) == len(tracks)  # the newest line is always seen
    assert not any("…" in line for line in full_rows)  # and no line is cut


@pytest.mark.parametrize(("width", "height"), [(80, 10), (17, 50), (20, 20)])
def test_a_terminal_too_small_for_panels_gets_lines(width: int, height: int) -> None:
    assert best_layout(len(demo_prompts()), width, height) is None


def test_lines_have_no_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    view = LineView()
    with view.starting(lambda: "x"), view.running([]):
        view.ended(track(STARTED, Tokens((9, 1), 0, (1,), "a\nb " * 200), finished("stop", usage=Usage(1, 1))))
    view.show_totals(totals([track(STARTED, TOKENS, finished("stop"))], {}))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert all(len(line) < 300 for line in out.splitlines())
    assert "title (stop, 1 token): prompt" in out
