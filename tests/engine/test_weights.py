"""Which checkpoints are taken, and in what words the others are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.checkpoint import weight_files
from headrace.engine.config import LayerConfig, ModelConfig, read_model_config
from headrace.engine.errors import ModelError, ModelNotFoundError, UnsupportedModelError, WeightsError
from headrace.engine.families import FAMILIES
from headrace.engine.rope import RopeConfig
from headrace.engine.weights import allocate, load_weights
from tests.support.checkpoints import LLAMA3, SHAPES, Shape, checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one's own, to damage."""
    return Path(shutil.copytree(checkpoint(Shape()), tmp_path / "model"))


def edit(folder: Path, **values: Any) -> None:
    """Change entries of config.json; None removes."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def load(folder: Path) -> None:
    load_weights(folder, read_model_config(folder), torch.float32, CPU)


def test_a_configuration_is_read_whole() -> None:
    got = read_model_config(checkpoint(SHAPES["gqa3-llama3"]))
    assert got == ModelConfig(
        architecture="LlamaForCausalLM", family=FAMILIES["LlamaForCausalLM"], vocab_size=320, hidden_size=96,
        intermediate_size=80, num_heads=3, num_kv_heads=1, head_dim=64, max_position=512, rms_norm_eps=1e-5,
        ropes=(RopeConfig("llama3", 10_000.0, 8.0, 1.0, 4.0, 64),), layers=(LayerConfig(0, 0),) * 2,
        tie_word_embeddings=True, qkv_bias=False, out_bias=False, mlp_bias=False, dtype="float32",
        eos_token_ids=frozenset({1}), scale=0.125,
    )  # fmt: skip


def test_the_layout_of_older_files(folder: Path) -> None:
    rope = {"rope_type": "llama3", **{k: v for k, v in LLAMA3 if k != "rope_type"}}
    edit(folder, rope_parameters=None, rope_theta=500_000.0, rope_scaling=rope, dtype=None, torch_dtype="bfloat16")
    rope.pop("rope_theta")
    edit(folder, rope_scaling=rope)
    got = read_model_config(folder)
    assert got.ropes == (RopeConfig("llama3", 500_000.0, 8.0, 1.0, 4.0, 64),)
    assert got.dtype == "bfloat16"


def test_what_a_file_leaves_out_has_the_architectures_defaults(folder: Path) -> None:
    edit(folder, num_key_value_heads=None, head_dim=None, rope_parameters=None, tie_word_embeddings=None, mlp_bias=None)
    got = read_model_config(folder)
    assert (got.num_kv_heads, got.head_dim, got.ropes[0].theta) == (4, 16, 10_000.0)
    assert (got.tie_word_embeddings, got.mlp_bias) == (False, False)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [(1, None, {1}), ([1, 2], [3, 4], {1, 2, 3, 4}), (None, 7, {7}), (0, [0], {0}), (None, None, set())],
)
def test_every_eos_id_counts(folder: Path, config: Any, generation: Any, ids: set[int]) -> None:
    edit(folder, eos_token_id=config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert read_model_config(folder).eos_token_ids == ids


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("auto_map", {"auto_map": {"AutoModel": "modeling.Evil"}}, "remote code"),
    ("quantization_config", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ("is_encoder_decoder", {"is_encoder_decoder": True}, "[Ee]ncoder-decoder"),
    (
        "architectures",
        {"architectures": ["MambaForCausalLM"]},
        "MambaForCausalLM.*supported: LlamaForCausalLM, Mistral",
    ),
    ("architectures", {"architectures": []}, "none"),
    ("hidden_act", {"hidden_act": "gelu"}, "gelu"),
    ("dtype", {"dtype": "float64"}, "float64"),
    ("rope_type", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
    ("sliding_window", {"sliding_window": 8}, "sliding_window"),
    ("layer_types", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ("layer_types", {"layer_types": ["full_attention", "sliding_attention"]}, "Layers of other types"),
    ("final_logit_softcapping", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("attn_logit_softcapping", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ("residual_multiplier", {"residual_multiplier": 0.2}, "residual_multiplier"),
    ("no_rope_layers", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("num_local_experts", {"num_local_experts": 4}, "num_local_experts"),
    ("use_bidirectional_attention", {"use_bidirectional_attention": True}, "later positions"),
    (
        "partial_rotary_factor",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "part of each head",
    ),
]


@pytest.mark.parametrize(("feature", "change", "words"), REFUSED)
def test_refused_by_name_before_any_weight_is_read(
    folder: Path, feature: str, change: dict[str, Any], words: str
) -> None:
    edit(folder, **change)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        read_model_config(folder)
    assert caught.value.feature == feature
    assert isinstance(caught.value, ValueError)


def test_no_model_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model directory"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "\udcff"])
def test_a_damaged_configuration(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_config(folder)


@pytest.mark.parametrize("change", [{"num_key_value_heads": 3}, {"head_dim": 15}, {"hidden_size": "many"}])
def test_a_configuration_that_contradicts_itself(folder: Path, change: dict[str, Any]) -> None:
    edit(folder, **change)
    with pytest.raises(ModelError):
        read_model_config(folder)


@pytest.mark.parametrize("shape", [*SHAPES.values(), Shape(shards=4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_comes_to_its_place(shape: Shape, dtype: torch.dtype) -> None:
    folder = checkpoint(shape)
    config = read_model_config(folder)
    seen: list[tuple[int, int]] = []
    weights = load_weights(folder, config, dtype, CPU, lambda done, total: seen.append((done, total)))
    files = weight_files(folder)
    assert len(files) >= shape.shards
    on_disk = {name: tensor.to(dtype) for file in files for name, tensor in load_file(file).items()}
    _, places = allocate(config, dtype, CPU)
    assert set(places) == set(on_disk)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == len(on_disk)
    assert (
        {total for _, total in seen} == {seen[-1][0]} == {sum(each.numel() for each in on_disk.values()) * 4}
    )  # float32 on disk
    layer = "model.layers.0.self_attn."
    assert torch.equal(weights.layers[0].qkv.plain, torch.cat([on_disk[f"{layer}{x}_proj.weight"] for x in "qkv"]))
    gate_up = [on_disk[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(weights.layers[0].gate_up.plain, torch.cat(gate_up))
    if shape.bias:
        assert weights.layers[0].qkv_bias is not None
        assert torch.equal(weights.layers[0].qkv_bias, torch.cat([on_disk[f"{layer}{x}_proj.bias"] for x in "qkv"]))
    assert (weights.output is weights.embedding) == shape.tied
    itemsize = {name: 4 if "norm" in name else dtype.itemsize for name in on_disk}
    assert weights.num_bytes == sum(tensor.numel() * itemsize[name] for name, tensor in on_disk.items())


def test_missing_unexpected_and_wrong_shapes_are_all_named(folder: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(95, 64)

    rewrite(folder, damage)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    assert str(caught.value) == (
        "The weights do not fit the configuration; missing: model.norm.weight; "
        "unexpected: model.layers.2.mlp.up_proj.weight; "
        "of another shape: model.layers.0.mlp.up_proj.weight is [95, 64] instead of [96, 64]."
    )
    assert set(caught.value.names) == {
        "model.norm.weight", "model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight",
    }  # fmt: skip


def test_tensors_that_follow_from_others_may_be_there(folder: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    rewrite(folder, add)
    load(folder)


def test_an_untied_output_must_be_there(folder: Path) -> None:
    edit(folder, tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=r"missing: lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_pickles_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedModelError, match=f"pickles.*{name}"):
        load(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("length", [0, 5, 1000])
def test_a_file_that_was_cut_short(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(WeightsError, match=r"model\.safetensors is no readable"):
        load(folder)


@pytest.mark.parametrize("name", ["model-00009-of-00009.safetensors", "../model.safetensors", "/etc/passwd"])
def test_an_index_may_only_name_files_beside_it(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(WeightsError, match="not beside it"):
        load(folder)
