"""Brings our own decoder onto a GPU: weights, what a step takes there, as many KV blocks as are left room for, graphs.

    free memory
    [ weights | a step, as it was measured | graphs | KV blocks ...................... | left to others ]

What a step takes is measured, not worked out: the largest one is computed before there are blocks, for nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from ..kernels.backend import Backend
from .checkpoint import Progress
from .config import ModelConfig
from .device import Device
from .device_runner import DeviceRunner
from .errors import MemoryBudgetError, UnsupportedModelError
from .kv_scales import find_scales
from .memory import Footprint, footprint, gib, plan_num_blocks, too_large
from .passes import DecoderPasses
from .runner import RunnerLimits
from .types import EngineConfig
from .weights import DecoderWeights, allocate, load_weights

LOWER = "max_num_batched_tokens or max_num_seqs"  # where a step takes too much
E4M3_FROM = 89  # the first capability with it
GRAPH_BYTES = 4 << 20  # of a graph, besides the memory that all of them share
T = TypeVar("T")
logger = logging.getLogger(__name__)


def load_on_device(
    model_dir: Path,
    model: ModelConfig,
    config: EngineConfig,
    types: tuple[torch.dtype, torch.dtype],
    backend: Backend,
    device: Device,
    progress: Progress | None = None,
) -> DeviceRunner:
    """Load weights, plan memory and build the runner.

    types  of weights and activations, and of the KV cache

    Raises:
        UnsupportedModelError: the device does not know the cache's type.
        WeightsError: as `load_weights`.
        MemoryBudgetError: it does not fit; the message names the setting to change.
    """
    dtype, kv_dtype = types
    passes = DecoderPasses(model, _weights(model_dir, model, config, types, device, progress), backend)
    max_model_len = config.max_model_len or model.max_position
    limits = RunnerLimits(
        num_blocks=1, num_window_blocks=1, block_size=config.block_size, max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens, kv_dtype=kv_dtype,
    )  # fmt: skip
    scales = find_scales(model_dir, passes, backend.kv_layout, kv_dtype, max_model_len)
    graphs = model.experts is None  # whose reference asks the host which experts there are

    def largest_step() -> None:
        DeviceRunner(passes, backend, limits, device, scales, graphs=False).rehearse()

    step_bytes = _fitting("one step", LOWER, device, lambda: device.peak_bytes(largest_step))
    size = footprint(model, config, passes.weights.num_bytes, dtype.itemsize, kv_dtype)
    size = replace(size, step_bytes=step_bytes + _graph_bytes(size, config, graphs=graphs))
    counts = plan_num_blocks(size, config, max_model_len, device.free_bytes() + size.weights_bytes, whole=True)
    logger.info("On the device: weights %d bytes, a step %d, %d KV blocks", size.weights_bytes, step_bytes, counts.full)
    limits = replace(limits, num_blocks=counts.full, num_window_blocks=counts.window)
    return _fitting("KV blocks and graphs", "gpu_memory_utilization", device, lambda: DeviceRunner(
        passes, backend, limits, device, scales, graphs=graphs
    ))  # fmt: skip


def _weights(
    model_dir: Path,
    model: ModelConfig,
    config: EngineConfig,
    types: tuple[torch.dtype, torch.dtype],
    device: Device,
    progress: Progress | None,
) -> DecoderWeights:
    """Load them, if the device knows the cache's type and has room."""
    dtype, kv_dtype = types
    if kv_dtype == torch.float8_e4m3fn and device.capability < E4M3_FROM:
        raise UnsupportedModelError(
            "kv_cache_dtype",
            f"This GPU (sm_{device.capability}) has no float8 e4m3; choose kv_cache_dtype fp8_e5m2 or int8.",
        )
    needed = allocate(model, dtype, torch.device("meta"))[0].num_bytes
    usable = int(device.free_bytes() * config.gpu_memory_utilization)
    if needed > usable:
        raise too_large(f"the weights need {gib(needed)}", "the size of the model", needed, usable)
    return _fitting("the weights", "the size of the model", device, lambda: load_weights(
        model_dir, model, dtype, device.device, progress
    ))  # fmt: skip


def _graph_bytes(size: Footprint, config: EngineConfig, *, graphs: bool) -> int:
    """What graphs take: the activations of max_num_seqs tokens, which they share, and something each."""
    if not graphs:
        return 0
    per_token = size.step_bytes // config.max_num_batched_tokens
    return per_token * config.max_num_seqs + GRAPH_BYTES * (config.max_num_seqs // 8 + 3)


def _fitting(what: str, lower: str, device: Device, make: Callable[[], T]) -> T:
    """Do something; say which setting to lower where the device's memory does not suffice."""
    free = device.free_bytes()
    try:
        return make()
    except torch.OutOfMemoryError as error:
        raise MemoryBudgetError(
            f"Not enough memory on the device: {what} took more than the {free / (1 << 30):.2f} GiB that were free. "
            f"Lower {lower}.", free, free,
        ) from error  # fmt: skip
