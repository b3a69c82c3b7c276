"""Loading onto a device: types that it does not know, memory that does not suffice, blocks by what was measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.engine.config import read_model_config
from headrace.engine.device_runner import DeviceRunner
from headrace.engine.engine import Engine
from headrace.engine.errors import MemoryBudgetError, UnsupportedModelError
from headrace.engine.load_device import load_on_device
from headrace.engine.types import EngineConfig
from tests.support.checkpoints import Shape, checkpoint
from tests.support.device_rig import kernel_backend
from tests.support.stand_in import StandIn
from tests.support.torch_rig import TorchRig, prompt, rig

SHAPE = Shape(layers=1)
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 64}
KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = 2 * 4 * SHAPE.kv_heads * SHAPE.head_dim * 4  # keys and values of a block in the only layer


def load(device: StandIn, kv_dtype: torch.dtype = torch.float32, **config: Any) -> DeviceRunner:
    folder = checkpoint(SHAPE)
    full = EngineConfig(**{**SIZES, **config})
    types = torch.float32, kv_dtype
    return load_on_device(folder, read_model_config(folder), full, types, kernel_backend(), device)


def roomy(free: int = 100 * MIB, peak: int = 0) -> StandIn:
    device = StandIn("eager")
    device.free, device.peak = free, peak
    return device


def test_what_is_loaded_answers_as_on_the_cpu() -> None:
    config = EngineConfig(**SIZES)
    made = TorchRig(load(roomy()), config)  # type: ignore[arg-type]
    plain = rig(SHAPE, "torch", **SIZES)
    for each in (made, plain):
        for number in range(3):
            each.add(str(number), prompt(9, SHAPE.vocab, number), max_tokens=6)
        each.run()
    assert made.tokens == plain.tokens


def test_blocks_get_what_a_step_leaves() -> None:
    free, low, high = 100 * MIB, 0, 100 * MIB  # a step that takes `low` leaves all blocks that are of use, `high` none
    at_most = SIZES["max_num_seqs"] * SIZES["max_model_len"] // SIZES["block_size"]
    assert load(roomy(free, low)).num_blocks == at_most
    while high - low > BLOCK_BYTES:
        middle = (low + high) // 2
        try:
            low, high = (middle, high) if load(roomy(free, middle)).num_blocks == at_most else (low, middle)
        except MemoryBudgetError:
            high = middle
    for missing in (1, 20, 60):
        assert load(roomy(free, low + missing * BLOCK_BYTES)).num_blocks in (at_most - missing, at_most - missing - 1)


def test_e4m3_is_refused_where_a_gpu_lacks_it() -> None:
    device = roomy()
    device.capability = 86
    with pytest.raises(UnsupportedModelError, match=r"sm_86.*choose kv_cache_dtype fp8_e5m2 or int8"):
        load(device, torch.float8_e4m3fn)
    assert load(device, torch.float8_e5m2).num_blocks


def test_weights_that_do_not_fit_are_not_read() -> None:
    with pytest.raises(MemoryBudgetError, match=r"the weights need .* Lower the size of the model"):
        load(roomy(free=KIB))


def test_a_step_that_leaves_no_room_names_what_to_lower() -> None:
    with pytest.raises(MemoryBudgetError, match="Lower max_num_batched_tokens or max_num_seqs"):
        load(roomy(free=10 * MIB, peak=20 * MIB))


def test_memory_that_runs_out_in_the_trial_names_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(runner: DeviceRunner) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DeviceRunner, "rehearse", exhausted)
    with pytest.raises(MemoryBudgetError, match=r"one step took more .* Lower max_num_batched_tokens or max_num_seqs"):
        load(roomy())


def test_a_float8_cache_has_its_scales() -> None:
    made = TorchRig(load(roomy(), torch.float8_e5m2), EngineConfig(**SIZES))  # type: ignore[arg-type]
    made.add("a", prompt(9, SHAPE.vocab), max_tokens=4)
    assert len(made.run().tokens["a", 0]) == 4


def test_an_engine_counts_the_devices_blocks() -> None:
    runner = load(roomy(), num_kv_blocks=20)
    assert Engine(runner, EngineConfig(**SIZES)).stats().total_blocks == 20
