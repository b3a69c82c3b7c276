"""The runner for devices: graphs against none, steps that overlap against steps one by one, and whose bits are whose.

Tolerance of scores: both sides compute in one type and differ in what torch's products choose for other numbers of
rows. A score is behind a few dozen operations of a few layers, each of which rounds to the type once: in bfloat16
(2⁻⁸ each, at random) 2⁻⁵ of the largest score, in float32 (2⁻²⁴ each, after sums of up to 2,048 terms) 2⁻¹⁴. Where
tokens differ, their scores must be as close as that, and what follows is not compared.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

import torch

from headrace.engine.engine import Engine
from headrace.engine.passes import DecoderPasses
from headrace.engine.runner import RunnerLimits
from headrace.engine.types import Plan, Request, SamplingOptions
from headrace.kernels.gpu.shapes import split_for
from headrace.kernels.lists import ints

from .afar import same_bits
from .models import SMALL, TINY, backend, device_runner, engine_on, random_passes
from .notebook import Notebook

TITLE = "The runner"
HOW = (
    "A small decoder of random weights, on `DeviceRunner`: the same requests, greedy and sampled, with replayed graphs "
    "and without, with steps that overlap and without; and one sequence beside others."
)
TOLERANCE = {torch.float32: 2.0**-14, torch.bfloat16: 2.0**-5}
Scores = dict[str, torch.Tensor]  # of each request: float32 [tokens, vocab]


@dataclass(slots=True)
class Setting:
    """One model, and what is asked of it."""

    model: DecoderPasses
    limits: RunnerLimits
    crowd: int  # requests
    longest: int  # tokens of their prompts
    answer: int  # tokens, about the most of a request
    beside: int  # requests of those whose neighbours change
    shared: int  # tokens that some of them have in common


@dataclass(slots=True)
class Run:
    """What came out of an engine."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    scores: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    steps: int = 0


def find(notes: Notebook) -> None:
    """Do all checks of the runner."""
    dry, device = notes.ground.dry, notes.ground.device
    for dtype in (torch.float32,) if dry else (torch.float32, torch.bfloat16):
        ops, said = backend(notes.ground, dtype)
        notes.note(f"{str(dtype).removeprefix('torch.')}: {said}")
        model = random_passes(TINY if dry else SMALL, dtype, device, ops)
        limits = _limits(dry, dtype)
        split = split_for(limits.max_model_len)
        _of(
            notes,
            Setting(model, limits, 3, 4, 4, 2, split) if dry else Setting(model, limits, 24, 512, 40, 16, 2 * split),
        )


def _limits(dry: bool, dtype: torch.dtype) -> RunnerLimits:
    if dry:
        return RunnerLimits(60, 0, 16, 128, 2, 96, dtype)
    return RunnerLimits(2000, 0, 16, 2048, 32, 2048, dtype)


def _of(notes: Notebook, setting: Setting) -> None:
    name = str(setting.model.dtype).removeprefix("torch.")
    base = partial(_crowd, notes, setting)
    kept: list[Run] = []
    notes.check(f"{name}: runs, graphs, overlap", lambda: _kept(base(), kept))
    if kept:
        notes.check(f"{name}: two runs have the same bits", lambda: _equal(base(), kept[0]))
        agree = partial(_agree, notes, setting.model.dtype, want=kept[0])
        notes.check(f"{name}: graphs replayed against none", lambda: agree(base(graphs=False)))
        notes.check(f"{name}: overlapping against one by one", lambda: agree(base(overlap=False)))
    notes.check(f"{name}: other neighbours change no bit", partial(_neighbours, notes, setting))
    notes.check(f"{name}: a shared prefix changes no bit", partial(_sharing, notes, setting))


def _kept(run: Run, kept: list[Run]) -> str:
    kept.append(run)
    return f"{run.steps} steps, {sum(map(len, run.tokens.values()))} tokens"


def _engine(notes: Notebook, setting: Setting, run: Run, *, graphs: bool, overlap: bool, sharing: bool) -> Engine:
    runner = device_runner(setting.model, notes.ground.line(), setting.limits, graphs=graphs, sharing=sharing)

    def keep(plan: Plan, scores: torch.Tensor) -> None:
        sampling = [row.sequence.request_id for row in plan.rows if row.samples]
        for request_id, row in zip(sampling, scores, strict=True):
            run.scores[request_id].append(row.clone())

    runner.on_logits = keep
    return engine_on(runner, setting.limits, overlap=overlap)


def _prompt(count: int, vocab: int, seed: int) -> tuple[int, ...]:
    return tuple(ints(torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))))


def _finish(engine: Engine, run: Run) -> Run:
    while engine.has_work:
        for output in engine.step().outputs:
            if output.finish is not None and output.finish.reason != "length":
                raise AssertionError(f"{output.request_id} ended with {output.finish}")
            run.tokens[output.request_id] += output.token_ids
        run.steps += 1
    engine.check()
    return run


def _crowd(notes: Notebook, setting: Setting, *, graphs: bool = True, overlap: bool = True) -> Run:
    """Prompts and answers of all lengths, every third one sampled."""
    run, vocab = Run(), setting.model.vocab_size
    engine = _engine(notes, setting, run, graphs=graphs, overlap=overlap, sharing=not notes.ground.dry)
    for number in range(setting.crowd):
        temperature = 0.8 if number % 3 == 2 else 0.0
        options = SamplingOptions(
            2 + 5 * number % setting.answer, temperature=temperature, seed=number, top_p=0.9, ignore_eos=True
        )
        engine.add(Request(str(number), _prompt(3 + 37 * number % setting.longest, vocab, number), options))
    return _finish(engine, run)


def _equal(got: Run, want: Run) -> None:
    if got.tokens != want.tokens:
        raise AssertionError("the tokens differ")
    for request_id, scores in want.scores.items():
        same_bits(torch.stack(got.scores[request_id][: len(scores)]), torch.stack(scores))


def _agree(notes: Notebook, dtype: torch.dtype, got: Run, want: Run) -> str:
    """The same tokens but for ties, scores within the tolerance; says how far they are and whether bits are equal."""
    notes.ground.wait()
    ties, largest = 0, 0.0
    for request_id, tokens in want.tokens.items():
        if len(got.tokens[request_id]) != len(tokens):
            raise AssertionError(f"request {request_id}: another number of tokens")
        for at, (mine, other) in enumerate(zip(got.tokens[request_id], tokens, strict=True)):
            ours, theirs = got.scores[request_id][at].double(), want.scores[request_id][at].double()
            most = float(theirs.abs().max())
            largest = max(largest, float((ours - theirs).abs().max()) / most)
            if not largest <= TOLERANCE[dtype]:
                raise AssertionError(f"request {request_id}, token {at}: scores are {largest:.3g} of the largest apart")
            if mine != other:
                if int(request_id) % 3 != 2 and float(theirs[other] - theirs[mine]) > 2 * TOLERANCE[dtype] * most:
                    raise AssertionError(f"request {request_id}, token {at}: {mine} instead of {other}")
                ties += 1
                break
    return f"{ties} ties; {'the same bits' if largest == 0 else f'scores at most {largest:.1e} of the largest apart'}"


def _beside(notes: Notebook, setting: Setting, salt: int, count: int) -> torch.Tensor:
    """Scores of one request beside others, whose prompts are as long whatever the salt."""
    run, vocab = Run(), setting.model.vocab_size
    engine = _engine(notes, setting, run, graphs=True, overlap=True, sharing=not notes.ground.dry)
    greedy = SamplingOptions(3 + setting.answer // 8, temperature=0.0, ignore_eos=True)
    for number in range(count):
        length, seed = setting.answer // 2 + 5 * number, (0 if number == 0 else salt + number)
        engine.add(Request(str(number), _prompt(length, vocab, seed), greedy))
    return torch.stack(_finish(engine, run).scores["0"][: 3 + setting.answer // 8])


def _neighbours(notes: Notebook, setting: Setting) -> str:
    """As many sequences, as long, of other tokens: products of the same sizes, so the bits must be equal.

    Alone, where products are of other sizes, they need not be, and what they are is said.
    """
    one, other = (_beside(notes, setting, salt, setting.beside) for salt in (100, 200))
    same_bits(one, other)
    alone = _beside(notes, setting, 100, 1)
    apart = float((one - alone).abs().max() / alone.abs().max())
    if not apart <= TOLERANCE[setting.model.dtype]:
        raise AssertionError(f"alone, scores are {apart:.3g} of the largest apart")
    return f"alone, {'the same bits' if apart == 0 else f'at most {apart:.1e} of the largest score apart'}"


def _sharing(notes: Notebook, setting: Setting) -> None:
    runs: list[Run] = []
    for sharing in (True, False):
        run, vocab = Run(), setting.model.vocab_size
        engine = _engine(notes, setting, run, graphs=True, overlap=True, sharing=sharing)
        prefix = _prompt(setting.shared, vocab, 1)
        for number in range(3):
            options = SamplingOptions(4 + setting.answer // 8, temperature=0.0, ignore_eos=True)
            engine.add(Request(str(number), (*prefix, *_prompt(3 + number, vocab, 9 + number)), options))
            for output in engine.step().outputs:  # so that the next one finds what this one has computed
                run.tokens[output.request_id] += output.token_ids
        runs.append(_finish(engine, run))
        if engine.stats().prefix_hits < 2 * setting.shared - 2 * setting.limits.block_size:
            raise AssertionError("nothing was shared")
    _equal(*runs)
