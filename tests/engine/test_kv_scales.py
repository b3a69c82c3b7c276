"""What float8 caches are scaled by: as the checkpoint says, or as a trial shows; never one for all by default."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.config import read_model_config
from headrace.engine.errors import UnsupportedModelError, WeightsError
from headrace.engine.kv_scales import HEADROOM, scales_for
from headrace.engine.load import load_engine
from headrace.engine.runner import TorchRunner
from headrace.engine.types import EngineConfig
from headrace.kernels.attention import paged_attention
from headrace.kernels.kv_layout import FLOAT8_LARGEST, decode, encode
from headrace.kernels.rotary import rotate_and_store
from tests.support.checkpoints import Shape, checkpoint
from tests.support.torch_rig import TorchRig, prompt, rig, torch_runner

E4M3, E5M2 = FLOAT8_LARGEST
SHAPE = Shape()
KV_ONLY = {  # as published files have it
    "quant_method": "compressed-tensors", "config_groups": {}, "format": "dense", "ignore": [],
    "quantization_status": "compressed", "global_compression_ratio": 1.0,
    "kv_cache_scheme": {
        "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False, "group_size": None,
        "actorder": None, "observer": "minmax", "observer_kwargs": {}, "block_structure": None,
    },
}  # fmt: skip


def with_scales(folder: Path, scales: dict[str, torch.Tensor], bias: float = 0.0) -> Path:
    """A copy of the small checkpoint that has these tensors as well."""
    made = copytree(checkpoint(SHAPE), folder / "model")
    file = made / "model.safetensors"
    save_file({**load_file(file), **scales}, file, {"format": "pt"})
    return made


def every_layer(name: str = "self_attn.{}_scale", shape: tuple[int, ...] = (1,)) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.{name.format(kind)}": torch.full(shape, 0.25 * (layer + 1) + more)
        for layer in range(SHAPE.layers) for kind, more in (("k", 0.0), ("v", 0.125))
    }  # fmt: skip


def scales_of(runner: TorchRunner) -> torch.Tensor:
    scales = runner._cache.scales  # pyright: ignore[reportPrivateUsage]
    assert scales is not None
    return scales


@pytest.mark.parametrize("dtype", list(FLOAT8_LARGEST))
def test_a_trial_finds_scales_that_leave_room(dtype: torch.dtype) -> None:
    largest = torch.tensor([0.001, 0.5, 1.0, 447.0, 3e5, 0.0])
    scales = scales_for(largest, dtype)
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales), "powers of two"
    fits = HEADROOM * largest / scales
    assert (fits <= FLOAT8_LARGEST[dtype]).all()
    assert (fits[:-1] > FLOAT8_LARGEST[dtype] / 2 / 1.0001).all(), "none is larger than it has to be"
    assert scales[-1] == 1.0


def test_a_trial_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plain = scales_of(torch_runner(SHAPE, EngineConfig(kv_cache_dtype="fp8_e4m3", max_model_len=64)))
    assert "found by trying" in caplog.text
    assert plain.shape == (SHAPE.layers, 2, SHAPE.kv_heads)


def test_a_trial_looks_at_each_head(tmp_path: Path) -> None:
    """Keys of one head made 4,000 times as large: its scale follows, the others' do not."""
    made = copytree(checkpoint(SHAPE), tmp_path / "model")
    weights = load_file(made / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    size = len(weights[name]) // SHAPE.kv_heads
    weights[name][:size] *= 4000.0
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    config = EngineConfig(kv_cache_dtype="fp8_e4m3", max_model_len=64, num_kv_blocks=64)
    plain, large = (scales_of(torch_runner(at, config)) for at in (SHAPE, made))
    ratio = large[0, 0, 0] / plain[0, 0, 0]
    assert 2000 <= ratio <= 8000
    assert torch.equal(large[0, :, 1:], plain[0, :, 1:])


@pytest.mark.parametrize("name", ["self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{}_proj.output_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (SHAPE.kv_heads,)])
def test_scales_of_a_checkpoint_are_taken(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    made = with_scales(tmp_path, every_layer(name, shape))
    config = EngineConfig(kv_cache_dtype="fp8_e4m3", max_model_len=64, num_kv_blocks=64)
    scales = scales_of(torch_runner(made, config))
    assert torch.equal(scales[:, 0, 0], torch.tensor([0.25 * (layer + 1) for layer in range(SHAPE.layers)]))
    assert torch.equal(scales[:, 1, -1], scales[:, 0, 0] + 0.125)


def test_scales_that_are_not_needed_change_nothing(tmp_path: Path) -> None:
    made = with_scales(tmp_path, every_layer())
    scores: list[torch.Tensor] = []
    for at in (SHAPE, made):
        each = rig(at, max_model_len=64)
        each.add("me", prompt(20, SHAPE.vocab))
        scores.append(each.run().scores("me"))
    assert torch.equal(*scores)


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in every_layer().items() if key != name}


BAD = [
    (without("model.layers.0.self_attn.k_scale"), "missing or not above 0: layer 0"),
    ({**every_layer(), "model.layers.1.self_attn.v_scale": torch.zeros(1)}, "not above 0: layer 1"),
    ({**every_layer(), "model.layers.1.self_attn.v_scale": torch.full((1,), torch.nan)}, "not above 0: layer 1"),
    ({**every_layer(), "model.layers.1.self_attn.v_scale": -torch.ones(1)}, "not above 0: layer 1"),
    ({**every_layer(), "model.layers.1.self_attn.v_scale": torch.ones(7)}, r"v_scale \[7\] is no scale"),
    ({**every_layer(), "model.layers.77.self_attn.v_scale": torch.ones(1)}, "layers.77.self_attn.v_scale"),
]


@pytest.mark.parametrize(("scales", "message"), BAD)
def test_scales_that_are_none_are_refused(tmp_path: Path, scales: dict[str, torch.Tensor], message: str) -> None:
    made = with_scales(tmp_path, scales)
    with pytest.raises(WeightsError, match=message):
        torch_runner(made, EngineConfig(kv_cache_dtype="fp8_e4m3", max_model_len=64, num_kv_blocks=64))


def test_a_checkpoint_of_which_only_the_cache_is_quantised(tmp_path: Path) -> None:
    made = with_scales(tmp_path, every_layer())
    describe(made, KV_ONLY)
    engine, _, _ = load_engine(made, EngineConfig(kv_cache_dtype="fp8_e4m3", max_model_len=64, num_kv_blocks=64))
    assert engine.stats().total_blocks == 64


@pytest.mark.parametrize(
    "change",
    [
        {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
        {"quant_method": "fp8"},
        {"kv_cache_scheme": None},
        {"kv_cache_scheme": {**KV_ONLY["kv_cache_scheme"], "num_bits": 4}},
        {"kv_cache_scheme": {**KV_ONLY["kv_cache_scheme"], "strategy": "channel"}},
        {"kv_cache_scheme": {**KV_ONLY["kv_cache_scheme"], "rounding": "up"}},
        {"sparsity_config": {"format": "2:4"}},
    ],
)
def test_whatever_else_is_quantised_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    made = with_scales(tmp_path, every_layer())
    describe(made, {**KV_ONLY, **change})
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        read_model_config(made)


def describe(folder: Path, quantization: dict[str, object]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))


@pytest.mark.parametrize("dtype", list(FLOAT8_LARGEST))
def test_float8_saturates_and_keeps_what_is_not_finite(dtype: torch.dtype) -> None:
    most, scales = FLOAT8_LARGEST[dtype], torch.tensor([2.0, 0.5])
    vectors = torch.tensor([[1.0, 4 * most, -4 * most, torch.nan, torch.inf, -torch.inf, 0.0, 0.3]] * 2)[None]
    got = decode(encode(vectors, dtype, scales), scales)[0]
    for head, scale in enumerate((2.0, 0.5)):
        assert got[head, :3].tolist() == [1.0, most * scale, -most * scale]
        assert got[head, 3:6].isnan().all()
        assert got[head, 6] == 0.0
        assert abs(float(got[head, 7]) - 0.3) <= 0.3 * (2.0**-4 if dtype == E4M3 else 2.0**-3)


def test_a_float8_cache_without_scales_is_an_error() -> None:
    cache = torch.zeros((2, 4, 1, 8)).to(E4M3)
    one, qkv = torch.zeros(1, dtype=torch.int64), torch.ones((1, 24))
    with pytest.raises(ValueError, match="kv_scales"):
        rotate_and_store(qkv, one, None, cache, cache, one)
    from headrace.kernels.attention import Paging

    paging = Paging(torch.zeros((1, 1)).int(), torch.tensor([0, 1]).int(), torch.tensor([1]).int())
    with pytest.raises(ValueError, match="kv_scales"):
        paged_attention(torch.ones((1, 1, 8)), cache, cache, paging, 1.0)


def test_the_same_through_transformers_code() -> None:
    """A model that is not native: its own code around our float8 cache."""
    from headrace.engine.load import load_runner, read_config
    from tests.support.foreign_families import family_checkpoint
    from tests.support.torch_rig import backend

    folder = family_checkpoint("gpt2")
    texts: list[torch.Tensor] = []
    for kind in ("auto", "fp8_e4m3"):
        config = EngineConfig(kv_cache_dtype=kind, max_model_len=64, num_kv_blocks=64, block_size=4)
        made = TorchRig(load_runner(folder, read_config(folder), config, torch.float32, backend("cpu")), config)
        made.add("me", [5, 6, 7, 8, 9, 10, 11])
        texts.append(made.run().scores("me"))
    assert not torch.equal(*texts)
    assert (texts[0] - texts[1]).abs().max() < 0.1 * texts[0].abs().max()
