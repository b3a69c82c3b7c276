"""An engine on a tiny checkpoint, watched at every step: what it scores, and that nothing it must not read comes out.

Before each step every block that nobody owns is filled with NaN, and after it the books must add up.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from headrace.engine.config import read_model_config
from headrace.engine.engine import Engine
from headrace.engine.load import load_runner
from headrace.engine.runner import TorchRunner
from headrace.engine.types import ChoiceOutput, EngineConfig, Finish, Plan, Request, SamplingOptions
from headrace.kernels.backend import Backend, choose_backend, open_library
from headrace.kernels.errors import BuildError

from .checkpoints import Shape, checkpoint

Key = tuple[str, int]  # request id, choice
BACKENDS = ("cpu", "cpu-onednn", "torch")
torch.set_num_threads(1)  # tiny models gain nothing from more, and every barrier waits for a core that others use


@cache
def backend(name: str) -> Backend:
    """One of the CPU backends; skips the test where it cannot be had."""
    library = open_library()
    if name != "torch" and isinstance(library, BuildError):
        pytest.skip(f"no compiled kernels here: {library}")
    return choose_backend(name, "cpu", library)


def torch_runner(
    shape: Shape | Path, config: EngineConfig, name: str = "cpu", dtype: torch.dtype = torch.float32
) -> TorchRunner:
    folder = shape if isinstance(shape, Path) else checkpoint(shape)
    return load_runner(folder, read_model_config(folder), config, dtype, backend(name))


@dataclass
class TorchRig:
    """`run` steps until nothing is left; then the fields hold what came out, per (request id, choice)."""

    runner: TorchRunner
    config: EngineConfig
    poison: bool = True
    tokens: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    logits: dict[Key, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[Key, list[ChoiceOutput]] = field(default_factory=lambda: defaultdict(list))
    finishes: dict[Key, Finish] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner.on_logits = self._keep
        self.engine = Engine(self.runner, self.config)

    def add(self, request_id: str, prompt: list[int], **options: object) -> None:
        """Add a request; greedy, 4 tokens and past EOS if not said."""
        full = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **options}
        settled = full.pop("settled", ())
        self.engine.add(Request(request_id, tuple(prompt), SamplingOptions(**full), settled))  # type: ignore[arg-type]

    def step(self) -> None:
        if self.poison:
            self.poison_free()
        for output in self.engine.step().outputs:
            key = (output.request_id, output.choice)
            self.outputs[key].append(output)
            self.tokens[key] += output.token_ids
            if output.finish is not None:
                self.finishes[key] = output.finish
        self.engine.check()

    def poison_free(self) -> None:
        for windowed in (False, True)[: 2 if self.runner.window else 1]:
            self.runner.poison_blocks(sorted(self.engine.free_block_ids(windowed=windowed)), windowed=windowed)

    def run(self) -> TorchRig:
        while self.engine.has_work:
            self.step()
        return self

    def scores(self, request_id: str, choice: int = 0) -> torch.Tensor:
        """Raw scores of every sampled position, [tokens, vocab]."""
        return torch.stack(self.logits[request_id, choice])

    def _keep(self, plan: Plan, logits: torch.Tensor) -> None:
        rows = [row.sequence for row in plan.rows if row.samples]
        for sequence, scores in zip(rows, logits, strict=True):
            self.logits[sequence.request_id, sequence.choice].append(scores.clone())


def rig(shape: Shape | Path, name: str = "cpu", dtype: torch.dtype = torch.float32, **config: object) -> TorchRig:
    """Build a rig on a shape's checkpoint or on one in a folder; `config` are EngineConfig's, by default roomy."""
    base = EngineConfig(max_num_seqs=64, max_num_batched_tokens=512, block_size=4, num_kv_blocks=600, max_model_len=256)
    full = replace(base, **config)  # type: ignore[arg-type]
    return TorchRig(torch_runner(shape, full, name, dtype), full)


def prompt(length: int, vocab: int, salt: int = 0) -> list[int]:
    """Ids that look random; the same for the same arguments, and a shorter one is the beginning of a longer one."""
    return [2 + (position * position * 31 + position * 7 + salt * 101 + 11) % (vocab - 2) for position in range(length)]
