"""Weights in 4 bits: values and whole checkpoints against transformers, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.config import ModelConfig, read_model_config
from headrace.engine.errors import MemoryBudgetError, ModelError, UnsupportedModelError, WeightsError
from headrace.engine.load import load_engine, load_runner, read_config, resolve_dtype
from headrace.engine.mxfp4 import dequantised
from headrace.engine.types import EngineConfig
from headrace.engine.weights import load_weights
from tests.support.checkpoints import cache_root
from tests.support.families import LAYERS, VOCAB, family_checkpoint
from tests.support.tolerances import INSIDE
from tests.support.torch_rig import TorchRig, backend, prompt

CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, block_size=4, num_kv_blocks=80, max_model_len=64)
PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


@cache
def packed_checkpoint() -> Path:
    """The tiny gpt-oss with experts of random bytes, each tensor and its scales in different files."""
    folder = Path(shutil.copytree(family_checkpoint("gpt-oss"), cache_root() / "gpt-oss-mxfp4"))
    random = torch.Generator().manual_seed(3)
    first, second = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            first[name] = tensor.bfloat16() if "layernorm" not in name else tensor
            continue
        count, inputs, outputs = tensor.shape
        shape = (count, outputs, inputs // 32)
        second[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(119, 126, shape, generator=random)  # few weights are above one
        first[f"{name}_scales"] = scales.to(torch.uint8)
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate((first, second), 1):
        weight_map |= dict.fromkeys(tensors, f"model-0000{number}-of-00002.safetensors")
        save_file(tensors, folder / f"model-0000{number}-of-00002.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    edit(folder, quantization_config=PUBLISHED, dtype=None)
    return folder


def edit(folder: Path, **values: Any) -> None:
    """Change entries of config.json; None removes."""
    config = {**json.loads((folder / "config.json").read_text()), **values}
    (folder / "config.json").write_text(json.dumps({name: each for name, each in config.items() if each is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed_checkpoint(), tmp_path / "model"))


@cache
def reference() -> Any:
    """What transformers makes of the same files."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    auto: Any = AutoModelForCausalLM
    how = Mxfp4Config(dequantize=True)
    return auto.from_pretrained(packed_checkpoint(), dtype=torch.float32, quantization_config=how).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_with_every_scale_is_what_transformers_makes_of_it(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    want = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].T
    got = dequantised(blocks.view(-1, 16), scales.view(-1)).to(dtype).view(256, 512)
    assert torch.equal(got, want)
    assert got[127].tolist()[:8] == [0.0, 0.0, 0.5, 0.0, 1.0, 0.0, 1.5, 0.0]


def test_weights_are_those_that_transformers_dequantises() -> None:
    config = read_model_config(packed_checkpoint())
    assert config.mxfp4 and config.dtype == "bfloat16"
    weights = load_weights(packed_checkpoint(), config, torch.bfloat16, torch.device("cpu"))
    for layer, theirs in zip(weights.layers, reference().model.layers, strict=True):
        experts = theirs.mlp.experts
        count, hidden, middle = experts.num_experts, experts.hidden_size, experts.intermediate_size
        gates = layer.gate_up.plain.view(count, 2, middle, hidden)
        for turn in range(2):
            want = experts.gate_up_proj[:, :, turn::2].transpose(1, 2)
            assert torch.equal(gates[:, turn].float(), want)
        assert torch.equal(layer.down.plain.view(count, hidden, middle).float(), experts.down_proj.transpose(1, 2))


def test_tokens_are_those_that_transformers_generates_from_the_same_files() -> None:
    config = read_model_config(packed_checkpoint())
    made = TorchRig(load_runner(packed_checkpoint(), config, CONFIG, torch.float32, backend("cpu")), CONFIG)
    for length in (5, 40):
        made.add(str(length), prompt(length, VOCAB, salt=length), max_tokens=8)
    made.run()
    for length in (5, 40):
        ids = torch.tensor([prompt(length, VOCAB, salt=length)])
        got = reference().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0,
            eos_token_id=VOCAB + 1,
        )  # fmt: skip
        assert made.tokens[str(length), 0] == got[0, length:].tolist()
        with torch.no_grad():
            scores = reference()(got).logits[0, length - 1 : -1]
        assert (made.scores(str(length)) - scores).abs().max() <= (LAYERS + 1) * INSIDE * scores.abs().max()


def test_they_are_bfloat16_unless_asked_for_otherwise_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = read_model_config(packed_checkpoint())
    assert resolve_dtype("auto", config, fast_bf16=False) == torch.bfloat16
    assert resolve_dtype("float32", config, fast_bf16=True) == torch.float32
    caplog.set_level(logging.INFO)
    seen: list[tuple[int, int]] = []
    engine, _, _ = load_engine(packed_checkpoint(), CONFIG, lambda done, total: seen.append((done, total)))
    assert engine.runner.dtype == torch.bfloat16  # type: ignore[attr-defined]
    assert any(
        "mxfp4) are brought to bfloat16" in record.message and "GiB" in record.message for record in caplog.records
    )
    files = packed_checkpoint().glob("*.safetensors")
    stored = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    assert seen[-1] == (stored, stored)


def test_memory_is_planned_for_what_they_become(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.load.available_bytes", lambda: 1 << 20)
    with pytest.raises(MemoryBudgetError, match="Not enough memory"):
        load_engine(packed_checkpoint(), CONFIG)


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"quant_method": "gptq"}, r"Quantised weights .*method gptq\) are not supported"),
        ({**PUBLISHED, "bits": 4}, "has 'bits', which is not known"),
        ({**PUBLISHED, "modules_to_not_convert": ["model.layers.0.mlp.experts"]}, r"names 'model\.layers\.0\.mlp\.exp"),
        ({**PUBLISHED, "modules_to_not_convert": "lm_head2"}, "names 'lm_head2' under modules_to_not_convert"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(folder: Path, described: dict[str, Any], words: str) -> None:
    edit(folder, quantization_config=described)
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        load_engine(folder, CONFIG)
    assert caught.value.feature == "quantization_config"


@pytest.mark.parametrize("described", [{"quant_method": "mxfp4"}, {**PUBLISHED, "modules_to_not_convert": None}])
def test_less_is_enough(folder: Path, described: dict[str, Any]) -> None:
    edit(folder, quantization_config=described)
    config = read_model_config(folder)
    assert isinstance(config, ModelConfig) and config.mxfp4


def test_other_architectures_have_no_weights_in_4_bits(tmp_path: Path) -> None:
    made = Path(shutil.copytree(family_checkpoint("mixtral"), tmp_path / "model"))
    edit(made, quantization_config=PUBLISHED)
    with pytest.raises(UnsupportedModelError, match="method mxfp4"):
        load_engine(made, CONFIG)


def test_tensors_that_do_not_fit_are_named(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    good = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    for tensor, words in (
        (good[name].to(torch.float32), rf"must be of type U8; {name} is F32"),
        (good[name][:, :, :, :8].clone(), rf"{name} is \[6, 64, 4, 8\] instead of \[6, 64, 4, 16\]"),
    ):
        save_file({**good, name: tensor}, file)
        with pytest.raises(WeightsError, match=words):
            load_engine(folder, CONFIG)
    save_file({key: tensor for key, tensor in good.items() if key != name}, file)
    with pytest.raises(WeightsError, match=f"missing: {name}"):
        load_engine(folder, CONFIG)


def test_a_configuration_that_does_not_say_so(folder: Path) -> None:
    edit(folder, quantization_config=None)
    with pytest.raises(ModelError, match=r"missing: .*gate_up_proj.*unexpected: .*_scales"):
        load_engine(folder, CONFIG)


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
def test_the_reason_is_what_our_own_decoder_lacks(folder: Path, name: str) -> None:
    """transformers' code takes none of these, whatever the sizes."""
    edit(folder, **{name: 48})
    with pytest.raises(ModelError, match=f"{name} is no multiple of 64"):
        read_config(folder)
