"""A whole engine on random weights: tokens a second, when they come, and what the host takes of it."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from headrace.engine.device import Device, Graph, Mark
from headrace.engine.engine import Engine
from headrace.engine.passes import DecoderPasses
from headrace.engine.runner import RunnerLimits
from headrace.engine.types import Request, SamplingOptions

from ..workloads import Work
from .models import LLAMA_8B, QWEN_06B, TINY, ModelSizes, backend, device_runner, engine_on, random_passes
from .notebook import Notebook

TITLE = "A whole engine"
HOW = (
    "Random weights in bf16, all requests at once, greedy, past EOS, prompts and answers of 100 to 1024 ids (seed 0). "
    "Host: a step's time without what is waited for the device."
)
BLOCK = 16
RESERVE_S = 15.0  # for a runner to be made, and what was found to be written
COLUMNS = (
    "model", "run", "tokens/s", "first token p50, ms", "p99", "between tokens p50, ms", "p99", "step, ms", "host, ms",
    "host's share", "tokens", "until the end",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """What runs."""

    models: tuple[ModelSizes, ...]
    count: int
    shortest: int
    longest: int
    batched: int  # tokens of a step
    fraction: int  # of an answer's length, in runs that are compared with one another
    prefix: int  # tokens that all have in common, in two of the runs
    room: int  # positions that a sequence has room for are a multiple of it
    limit_s: float  # of a run


REAL = Load((QWEN_06B, LLAMA_8B), 256, 100, 1024, 8192, 4, 1024, 512, 30.0)
DRY = Load((TINY,), 2, 2, 4, 64, 2, 32, 32, 30.0)


@dataclass(slots=True)
class Trace:
    """One run."""

    seconds: float = 0.0
    tokens: int = 0
    first_s: list[float] = field(default_factory=list[float])
    gaps_s: list[float] = field(default_factory=list[float])
    steps: int = 0
    waited_s: float = 0.0
    ended: bool = True


class WatchedLine:
    """A `Device` that counts the time for which it is waited for."""

    def __init__(self, inner: Device) -> None:
        self.device, self.capability, self.waited_s = inner.device, inner.capability, 0.0
        self._inner = inner

    def free_bytes(self) -> int:
        """See `Device`."""
        return self._inner.free_bytes()

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """See `Device`."""
        return self._inner.peak_bytes(work)

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        return self._inner.pinned(*shape, dtype=dtype)

    def put(self, work: Callable[[], None]) -> None:
        """See `Device`."""
        self._inner.put(work)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device`."""
        self._inner.copy(target, source)

    def mark(self) -> Mark:
        """See `Device`."""
        return _WatchedMark(self, self._inner.mark())

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `Device`."""
        return self._inner.capture(work)


class _WatchedMark:
    def __init__(self, line: WatchedLine, inner: Mark) -> None:
        self._line, self._inner = line, inner

    def wait(self) -> None:
        """See `Mark`."""
        begun_s = time.perf_counter()
        self._inner.wait()
        self._line.waited_s += time.perf_counter() - begun_s


def find(notes: Notebook) -> None:
    """Run everything, the short runs of a model after its long one."""
    load = DRY if notes.ground.dry else REAL
    notes.note(f"Answers of all runs but the first of each model are shorter: a {load.fraction}th")
    for sizes in load.models:
        made: list[DecoderPasses] = []
        notes.measure(f"{sizes.name}: weights", partial(_weights, notes, sizes, made))
        if made:
            _model(notes, load, sizes, made[0])
        made.clear()
        torch.cuda.empty_cache()  # nothing where there is no GPU


def _weights(notes: Notebook, sizes: ModelSizes, made: list[DecoderPasses]) -> None:
    ops, said = backend(notes.ground, torch.bfloat16)
    notes.note(f"{sizes.name}: {said}")
    made.append(random_passes(sizes, torch.bfloat16, notes.ground.device, ops))


def work_of(load: Load, vocab: int, fraction: int = 1, prefix: int = 0) -> list[Work]:
    """Requests: the same for the same arguments."""
    rnd = random.Random(0)
    head = [rnd.randrange(vocab) for _ in range(prefix)]
    made: list[Work] = []
    for _ in range(load.count):
        prompt = [rnd.randrange(vocab) for _ in range(rnd.randint(load.shortest, load.longest))]
        made.append(Work(head + prompt, max(1, rnd.randint(load.shortest, load.longest) // fraction)))
    return made


def _model(notes: Notebook, load: Load, sizes: ModelSizes, model: DecoderPasses) -> None:
    short = work_of(load, sizes.vocab, load.fraction)
    alike = work_of(load, sizes.vocab, load.fraction, load.prefix)
    runs: list[tuple[str, list[Work], dict[str, bool]]] = [
        ("all of it", work_of(load, sizes.vocab), {}),
        ("short", short, {}),
        ("short, no graphs", short, {"graphs": False}),
        ("short, steps one by one", short, {"overlap": False}),
        (f"short, {load.prefix} tokens in common", alike, {}),
        (f"short, {load.prefix} in common, each read for itself", alike, {"sharing": False}),
    ]
    for name, work, options in runs:
        notes.measure(f"{sizes.name}: {name}", partial(_run, notes, load, model, (sizes.name, name), work, **options))


def _run(
    notes: Notebook,
    load: Load,
    model: DecoderPasses,
    names: tuple[str, str],
    work: Sequence[Work],
    *,
    graphs: bool = True,
    overlap: bool = True,
    sharing: bool = True,
) -> None:
    gc.collect()  # the cache of the run before
    torch.cuda.empty_cache()
    line, limits = WatchedLine(notes.ground.line()), _limits(load, work, model)
    limit_s = min(load.limit_s, notes.left_s - RESERVE_S)
    if limit_s <= 0:
        raise TimeoutError("there was no time left for it")
    prefix = load.prefix if "in common" in names[1] else 0
    sharing = sharing and (prefix > 0 or not notes.ground.dry)  # each graph that is captured takes its time there
    runner = device_runner(model, line, limits, graphs=graphs, sharing=sharing)
    engine = engine_on(runner, limits, overlap=overlap)
    _drive(engine, line, [Work([*work[0].prompt[: max(prefix, 1)], 0], 2)], limit_s, "first")
    trace = _drive(engine, line, work, limit_s, "run")
    _write(notes, names, trace)


def _limits(load: Load, work: Sequence[Work], model: DecoderPasses) -> RunnerLimits:
    """As many blocks as all requests take, and some more."""
    lengths = [len(each.prompt) + each.num_out for each in work]
    blocks = sum(-(-length // BLOCK) + 1 for length in lengths) + load.longest // BLOCK
    longest = -(-max(lengths) // load.room) * load.room
    return RunnerLimits(blocks, 0, BLOCK, longest, load.count, load.batched, model.dtype)


def _drive(engine: Engine, line: WatchedLine, work: Sequence[Work], limit_s: float, name: str) -> Trace:
    """Step until nothing is left, or the time is up: what is open then is given up."""
    trace, last = Trace(), dict[str, float]()
    for number, each in enumerate(work):
        options = SamplingOptions(each.num_out, temperature=0.0, ignore_eos=True)
        engine.add(Request(f"{name}{number}", tuple(each.prompt), options))
    begun_s, waited_s = time.perf_counter(), line.waited_s
    while engine.has_work and trace.ended:
        outputs = engine.step().outputs
        now_s = time.perf_counter()
        for output in outputs:
            if output.finish is not None and output.finish.reason != "length":
                raise RuntimeError(f"{output.request_id} ended with {output.finish}")
            if output.request_id in last:
                trace.gaps_s.append(now_s - last[output.request_id])
            else:
                trace.first_s.append(now_s - begun_s)
            last[output.request_id] = now_s
            trace.tokens += len(output.token_ids)
        trace.steps += 1
        trace.ended = now_s - begun_s < limit_s
    trace.seconds, trace.waited_s = time.perf_counter() - begun_s, line.waited_s - waited_s
    wanted = sum(each.num_out for each in work)
    if trace.ended and trace.tokens != wanted:
        raise RuntimeError(f"{trace.tokens} tokens came out, not {wanted}")
    return trace


def quantile(values: Sequence[float], part: float) -> float:
    """The value that so large a part of them is not above; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def _write(notes: Notebook, names: tuple[str, str], trace: Trace) -> None:
    step_s = trace.seconds / trace.steps
    host_s = (trace.seconds - trace.waited_s) / trace.steps
    figures = [
        trace.tokens / trace.seconds,
        *(quantile(trace.first_s, part) * 1e3 for part in (0.5, 0.99)),
        *(quantile(trace.gaps_s, part) * 1e3 for part in (0.5, 0.99)),
        step_s * 1e3,
        host_s * 1e3,
        host_s / step_s,
    ]
    cells: list[Any] = [notes.figure(each) for each in figures]
    ended = "yes" if trace.ended else f"no, stopped after {trace.seconds:.0f} s"
    notes.row("Runs", COLUMNS, *names, *cells, trace.tokens, ended)
