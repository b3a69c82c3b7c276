"""Options that published files seldom have: computed as transformers computes them, or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.config import ModelConfig, read_model_config
from headrace.engine.errors import ModelError, UnsupportedModelError, WeightsError
from headrace.engine.load import load_runner, read_config
from headrace.engine.types import EngineConfig
from tests.support.families import VOCAB, family_checkpoint
from tests.support.torch_rig import TorchRig, backend, prompt

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}


def folder_with(tmp_path: Path, name: str, **values: Any) -> Path:
    """A copy of a family's checkpoint with other values in its configuration."""
    folder = tmp_path / "model"
    shutil.copytree(family_checkpoint(name), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **values}), encoding="utf-8")
    return folder


def assert_as_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    config, auto = EngineConfig(max_model_len=96, num_kv_blocks=64), AutoModelForCausalLM
    made = TorchRig(load_runner(folder, read_config(folder), config, torch.float32, backend("cpu")), config)
    ids = prompt(40, VOCAB, salt=3)
    made.add("a", ids, max_tokens=8)
    made.run()
    reference: Any = auto.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        want = reference(torch.tensor([[*ids, *made.tokens["a", 0][:-1]]])).logits[0, len(ids) - 1 :]
    assert (made.scores("a") - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 64}])
def test_the_original_length_beside_the_rotary_parameters_comes_first(
    tmp_path: Path, name: str, inside: dict[str, int]
) -> None:
    folder = folder_with(tmp_path, name, rope_parameters={**YARN, **inside}, original_max_position_embeddings=32)
    assert isinstance(read_config(folder), ModelConfig)
    assert_as_transformers(folder)


def test_an_output_matrix_that_is_stored_counts_even_where_it_is_said_to_be_tied(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "qwen3")
    tensors = load_file(folder / "model.safetensors")
    drawn = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(1))
    save_file({**tensors, "lm_head.weight": drawn}, folder / "model.safetensors", metadata={"format": "pt"})
    assert_as_transformers(folder)


@pytest.mark.parametrize("name", ["qwen3", "mistral-no-window"])
def test_an_output_matrix_alone_is_the_embedding_where_they_are_tied(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path, name)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_as_transformers(folder)


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight"])
def test_one_of_both_where_they_are_not_tied_is_refused_with_what_to_change(tmp_path: Path, stored: str) -> None:
    folder = folder_with(tmp_path, "qwen3", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    tensors[stored] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (other,) = {"model.embed_tokens.weight", "lm_head.weight"} - {stored}
    with pytest.raises(WeightsError, match=rf"missing: {other}\. .* set tie_word_embeddings to true"):
        assert_as_transformers(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_neither_of_both_is_refused(tmp_path: Path, tied: bool) -> None:
    folder = folder_with(tmp_path, "qwen3", tie_word_embeddings=tied)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"missing: model\.embed_tokens\.weight"):
        assert_as_transformers(folder)


@pytest.mark.parametrize(
    ("name", "values", "feature"),
    [
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ("qwen2", {"final_logit_softcapping": 1.0}, "final_logit_softcapping"),
        ("gemma3", {"attn_logit_softcapping": 1.0}, "attn_logit_softcapping"),
        ("gemma3", {"rope_parameters": {
            "full_attention": {**YARN, "truncate": False}, "sliding_attention": {"rope_type": "default"}}}, "truncate"),
    ],
)  # fmt: skip
def test_what_our_decoder_has_not_goes_to_transformers(
    tmp_path: Path, name: str, values: dict[str, Any], feature: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_model_config(folder_with(tmp_path, name, **values))
    assert caught.value.feature == feature


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 12, "short_factor": [1.0] * 12}


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("qwen2", {"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "low_freq_factor"),
        ("qwen2", {"rope_parameters": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                      "original_max_position_embeddings": 64.5}}, "whole number"),
        ("qwen2", {"rope_parameters": {**YARN, "original_max_position_embeddings": -5}}, "original_max"),
        ("qwen2", {"rope_parameters": {**YARN, "beta_fast": -1}}, "beta_fast"),
        ("qwen2", {"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_theta"),
        ("qwen2", {"rope_parameters": {**YARN, "attention_factor": "x"}}, "attention_factor"),
        ("qwen2", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": -100.0}}, "mscale_all_dim"),
        ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.0}}, "rotated in pairs"),
        ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": "x"}}, "describe a model"),
        ("phi3", {"rope_parameters": {**LONGROPE, "short_factor": ["a"] * 12}, "original_max_position_embeddings": 64},
         "short_factor"),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}}, "factor"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling"),
    ],
)  # fmt: skip
def test_numbers_that_mean_nothing_are_refused(tmp_path: Path, name: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_model_config(folder_with(tmp_path, name, **values))
