"""The three workloads and the queue's tax: sections made of `engine_run`, `queue_run`, `floor` and vLLM."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import engine_run, peers, queue_run
from .engine_run import FIRST_ONES, EngineRun
from .floor import FloorRun, fresh_floor
from .pairs import Comparison, Cost, alternate, compare, ratios, spread
from .peers import Vllm, VllmRun
from .queue_run import QueueRun
from .sections import Claim, Line, Plot, Section, Table
from .settings import Say, Settings
from .workloads import WORKLOADS

_FLOORS = {"torch": "torch", "own": "the backend's own"}
_QUICK = {"W1": 8, "W2": 64, "W3": 6}  # requests that are left in a quick run


def _engine(settings: Settings, say: Say, name: str) -> EngineRun:
    say(f"{name}, bare engine")
    return engine_run.fresh_run(settings, name, _QUICK[name])


def _queue(settings: Settings, say: Say, name: str) -> QueueRun:
    say(f"{name}, through the queue")
    return queue_run.fresh_run(settings, name, _QUICK[name])


@contextmanager
def _vllm(settings: Settings, say: Say, name: str) -> Generator[Callable[[], VllmRun | None]]:
    """A function that runs a workload on vLLM; gives None where there is none."""
    python = peers.vllm()
    if python is None:
        yield lambda: None
        return
    workload = WORKLOADS[name]
    work = workload.make()[: _QUICK[name] if settings.quick else None]
    num_first = FIRST_ONES if name == "W3" else 0
    say(f"{name}, vLLM starts and compiles")
    with Vllm(python, settings.model(workload.model), work, workload.max_num_seqs, num_first) as vllm:

        def run() -> VllmRun:
            say(f"{name}, vLLM")
            return vllm.run()

        yield run


def _cost(run: EngineRun | FloorRun) -> Cost:
    return Cost(run.wall_s, run.cpu_s)


def _said(comparison: Comparison) -> tuple[str, str, str]:
    return comparison.wall.text(), comparison.cpu.text(), comparison.unit


def _brief(run: EngineRun) -> dict[str, Any]:
    return {**asdict(run), "rows": len(run.rows), "step_ms": len(run.step_ms)}


def w1(settings: Settings, say: Say) -> Section:
    """W1 on the bare engine, beside its products alone and vLLM."""
    first = _engine(settings, say, "W1")
    floors = _floors(settings, say, first)
    with _vllm(settings, say, "W1") as theirs:
        pairs = alternate(lambda: _engine(settings, say, "W1"), theirs, settings.pairs) if peers.vllm() else []
    return _w1_section(first, floors, [(a, b) for a, b in pairs if b is not None])


def _w1_section(
    first: EngineRun,
    floors: Mapping[str, list[tuple[EngineRun, FloorRun]]],
    beside: list[tuple[EngineRun, VllmRun]],
) -> Section:
    over = {kind: compare([(_cost(a), _cost(b)) for a, b in pairs]) for kind, pairs in floors.items()}
    to_vllm = compare([(_cost(a), b.cost) for a, b in beside]) if beside else None
    rows = [(f"its products alone, {_FLOORS[kind]}", *_said(each)) for kind, each in over.items()]
    if to_vllm:
        rows.append((f"vLLM {beside[0][1].version}", *_said(to_vllm)))
    seconds = _w1_seconds(floors, beside)
    value, note = (to_vllm.quoted.median, "") if to_vllm else (None, peers.VLLM_MISSING)
    return Section(
        name="w1",
        title="W1: mixed requests",
        how="64 requests on smol135 in bfloat16, bare engine, fresh processes. The products alone are replayed at the "
        f"row counts of the {first.steps} steps that really ran, through torch and through the backend's own.",
        claims=(
            Claim("W1 over vLLM", value, 0.80, "×", note=note),
            Claim("W1 over vLLM, aim", value, 0.70, "×", note=note),
            Claim("W1 over its products alone, torch", over["torch"].quoted.median, 1.30, "×"),
            Claim("W1 over its products alone, the backend's own", over["own"].quoted.median, 1.30, "×"),
            Claim("W1 over its products alone, the backend's own, aim", over["own"].quoted.median, 1.15, "×"),
        ),
        tables=(
            Table("Seconds", ("", "seconds", "output tokens a second"), tuple(seconds)),
            Table("Ratios", ("headrace over", "seconds", "CPU seconds", "to be quoted"), tuple(rows)),
        ),
        plots=(_steps_plot(first), _bars("w1_seconds", "W1", seconds)),
        raw={
            "floor": {kind: [[_brief(a), asdict(b)] for a, b in pairs] for kind, pairs in floors.items()},
            "vllm": [[_brief(a), asdict(b)] for a, b in beside],
            "steps": {"rows": first.rows, "step_ms": first.step_ms},
        },
    )


def _w1_seconds(
    floors: Mapping[str, list[tuple[EngineRun, FloorRun]]], beside: list[tuple[EngineRun, VllmRun]]
) -> list[tuple[str, str, str]]:
    ours = [a for pairs in floors.values() for a, _ in pairs]
    return [
        ("headrace", spread([a.wall_s for a in ours]).text(2), spread([a.tokens_out / a.wall_s for a in ours]).text(0)),
        *(
            (f"products alone, {_FLOORS[kind]}", spread([b.wall_s for _, b in pairs]).text(2), "")
            for kind, pairs in floors.items()
        ),
        *_vllm_row([b for _, b in beside]),
    ]


def _floors(settings: Settings, say: Say, first: EngineRun) -> dict[str, list[tuple[EngineRun, FloorRun]]]:
    """W1 alternating with its products alone, of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        path.write_text(json.dumps(first.rows))

        def floor(kind: str) -> FloorRun:
            say(f"W1, its products alone ({kind})")
            return fresh_floor(settings.model("smol135"), path, kind)

        return {
            kind: alternate(lambda: _engine(settings, say, "W1"), lambda kind=kind: floor(kind), settings.pairs)
            for kind in _FLOORS
        }


def _vllm_row(runs: Sequence[VllmRun]) -> list[tuple[str, str, str]]:
    if not runs:
        return []
    rate = spread([each.tokens_out / each.wall_s for each in runs])
    return [(f"vLLM {runs[0].version}, offline", spread([each.wall_s for each in runs]).text(2), rate.text(0))]


def _steps_plot(run: EngineRun) -> Plot:
    line = Line("step", tuple(float(n) for n in range(run.steps)), tuple(run.step_ms))
    return Plot("w1_steps", "W1, each step", "step", "ms", (line,))


def _bars(name: str, title: str, rows: Sequence[tuple[str, str, str]]) -> Plot:
    values = tuple(float(seconds.split()[0]) for _, seconds, _ in rows)
    line = Line("seconds", tuple(float(n) for n in range(len(rows))), values)
    return Plot(name, title, "", "seconds", (line,), bars=True, ticks=tuple(row[0] for row in rows))


def w2(settings: Settings, say: Say) -> Section:
    """W2 through the queue, beside vLLM without one."""
    with _vllm(settings, say, "W2") as theirs:
        pairs = alternate(lambda: _queue(settings, say, "W2"), theirs, settings.pairs)
    return _w2_section(pairs, _engine(settings, say, "W2"))


def _w2_section(pairs: list[tuple[QueueRun, VllmRun | None]], bare: EngineRun) -> Section:
    both = [(a.cost, b.cost) for a, b in pairs if b is not None]
    to_vllm = compare(both) if both else None
    queue = [a for a, _ in pairs]
    wall = spread([a.wall_s for a in queue])
    rows = [
        ("headrace, through the queue", wall.text(2), spread([a.tokens_out / a.wall_s for a in queue]).text(0)),
        ("headrace, bare engine", f"{bare.wall_s:.2f}", f"{bare.tokens_out / bare.wall_s:.0f}"),
        *_vllm_row([b for _, b in pairs if b is not None]),
    ]
    cpu = tuple(
        (label, spread(values).text(2))
        for label, values in (
            ("worker", [a.worker_cpu_s for a in queue]),
            ("server", [a.server_cpu_s for a in queue]),
            ("client: submitting and reading", [a.client_cpu_s for a in queue]),
            ("bare engine", [bare.cpu_s]),
        )
    )
    value, note = (to_vllm.quoted.median, "") if to_vllm else (None, peers.VLLM_MISSING)
    columns = ("headrace over", "seconds", "CPU seconds", "to be quoted")
    ratio = (Table("Ratio", columns, (("vLLM", *_said(to_vllm)),)),) if to_vllm else ()
    return Section(
        name="w2",
        title="W2: the cost per token",
        how="1024 requests on tiny2 through Redis, submitted with the client library, read by one multiplexed reader: "
        "from the first submission to the last terminal entry. vLLM has no queue in between.",
        claims=(
            Claim("W2 through the queue over vLLM offline", value, 0.40, "×", note=note),
            Claim("W2 through the queue", wall.median, 8.0, "s"),
        ),
        tables=(
            Table("Seconds", ("", "seconds", "output tokens a second"), tuple(rows)),
            Table("CPU seconds", ("", "seconds"), cpu),
            *ratio,
        ),
        plots=(_bars("w2_seconds", "W2", rows),),
        raw={"pairs": [[asdict(a), asdict(b) if b else None] for a, b in pairs], "bare": _brief(bare)},
    )


def w3(settings: Settings, say: Say) -> Section:
    """W3: a prefix in common, first token cold and warm."""
    with _vllm(settings, say, "W3") as theirs:
        pairs = alternate(lambda: _engine(settings, say, "W3"), theirs, settings.pairs)
    ours, others = [a for a, _ in pairs], [b for _, b in pairs if b is not None]
    first = {"headrace": [a.first_token_s for a in ours]}
    if others:
        first["vLLM"] = [b.first_token_s for b in others]
    rows = tuple(
        (
            name,
            spread([times[0] for times in found]).text(3),
            spread([spread(times[1:]).median for times in found]).text(4),
            spread([max(times[1:]) / times[0] for times in found]).text(4),
        )
        for name, found in first.items()
    )
    warm = ratios([(spread(times[1:]).median, times[0]) for times in first["headrace"]])
    seconds = [
        ("headrace", spread([a.wall_s for a in ours]).text(2), spread([a.tokens_out / a.wall_s for a in ours]).text(0)),
        *_vllm_row(others),
    ]
    return Section(
        name="w3",
        title="W3: a prefix in common",
        how="32 requests on smol135 with 1536 tokens in common and 64 of their own. Four are run one after the other "
        "first: the first finds an empty cache.",
        claims=(Claim("first token, warm over cold", warm.median, 0.06, "×"),),
        tables=(
            Table("Seconds to the first token", ("", "cold", "warm", "slowest warm one over cold"), rows),
            Table("Seconds for all 32 afterwards", ("", "seconds", "output tokens a second"), tuple(seconds)),
        ),
        notes=() if others else (peers.VLLM_MISSING,),
        raw={"pairs": [[_brief(a), asdict(b) if b else None] for a, b in pairs]},
    )


def tax(settings: Settings, say: Say) -> Section:
    """What the queue costs on W1: CPU seconds of worker and server above those of the bare engine."""
    pairs = alternate(lambda: _queue(settings, say, "W1"), lambda: _engine(settings, say, "W1"), settings.pairs)
    over = ratios([(a.cost.cpu_s, b.cpu_s) for a, b in pairs])
    rows = tuple(
        (label, spread(values).text(2))
        for label, values in (
            ("bare engine", [b.cpu_s for _, b in pairs]),
            ("worker", [a.worker_cpu_s for a, _ in pairs]),
            ("server", [a.server_cpu_s for a, _ in pairs]),
            ("client: submitting and reading, not counted", [a.client_cpu_s for a, _ in pairs]),
        )
    )
    wall = ratios([(a.wall_s, b.wall_s) for a, b in pairs])
    return Section(
        name="tax",
        title="What the queue costs",
        how="W1 through Redis and on the bare engine, alternating: CPU seconds of worker and server together over "
        "those of the bare engine. Readers run on the same cores and are reported apart.",
        claims=(Claim("queue tax on W1", over.median - 1, 0.03, "of the engine's CPU seconds"),),
        tables=(
            Table("CPU seconds", ("", "seconds"), rows),
            Table("Queue over bare engine", ("CPU seconds", "seconds"), ((over.text(), wall.text()),)),
        ),
        raw={"pairs": [[asdict(a), _brief(b)] for a, b in pairs]},
    )
