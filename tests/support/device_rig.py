"""A rig (see `torch_rig`) on the runner for devices, on a device that stands in for a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headrace.engine.config import read_model_config
from headrace.engine.device_runner import DeviceRunner
from headrace.engine.load import load_runner
from headrace.engine.types import EngineConfig
from headrace.kernels.backend import Backend

from .checkpoints import Shape, checkpoint
from .stand_in import Pace, StandIn
from .torch_rig import TorchRig, backend
from .watched_work import as_kernel

SIZES = {
    "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "num_kv_blocks": 120, "max_model_len": 128,
}  # fmt: skip


def kernel_backend() -> Backend:
    """The plain references in the place of kernels: what they do inside is theirs."""
    plain = backend("torch")
    names = ("paged_attention", "rotate_and_store", "sample", "adjust", "logprobs", "copy_blocks", "experts")
    return replace(plain, **{name: as_kernel(getattr(plain, name)) for name in names})


def device_rig(
    shape: Shape | Path,
    pace: Pace = "lazy",
    ops: Backend | None = None,
    *,
    depth: int = 2,
    graphs: bool = True,
    seed: int = 0,
    **config: Any,
) -> TorchRig:
    """A rig on the stand-in; `config` are EngineConfig's."""
    full = EngineConfig(**{**SIZES, **config})
    folder = shape if isinstance(shape, Path) else checkpoint(shape)
    device = StandIn(pace, seed)
    made: DeviceRunner = load_runner(
        folder,
        read_model_config(folder),
        full,
        torch.float32,
        ops or kernel_backend(),
        make_runner=lambda model, ops, limits, scales: DeviceRunner(
            model, ops, limits, device, scales, graphs=graphs, depth=depth
        ),
    )
    made.stand_in = device  # type: ignore[attr-defined]  for tests
    return TorchRig(made, full)  # type: ignore[arg-type]
