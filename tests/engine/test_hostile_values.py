"""Single values of a configuration that no model can have: each is one error that names its key, in every family."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.config import ModelConfig
from headrace.engine.errors import ModelError
from headrace.engine.load import load_runner, read_config
from headrace.engine.model_folder import check_folder
from headrace.engine.types import EngineConfig
from tests.support.families import LONGROPE, MODELS, VOCAB, YARN, family_checkpoint
from tests.support.torch_rig import TorchRig, backend, prompt

CONFIG = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64, block_size=4, num_kv_blocks=32, max_model_len=64)
FAR = (1e-300, 1e-9, 1e300, 10**30)  # from what float32 can hold through a few products
NOT_POSITIVE = (0, -1, -0.5)
NO_NUMBER = ("x", [1], {"a": 1}, True)
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}


@cache
def config_of(name: str) -> dict[str, Any]:
    return json.loads((family_checkpoint(name) / "config.json").read_text())


def folder_with(at: Path, name: str, changes: dict[str, Any]) -> Path:
    """A family's checkpoint with other values in its configuration."""
    folder = Path(shutil.copytree(family_checkpoint(name), at / "model"))
    (folder / "config.json").write_text(json.dumps({**config_of(name), **changes}))
    return folder


def load(folder: Path) -> TorchRig:
    check_folder(folder)
    return TorchRig(load_runner(folder, read_config(folder), CONFIG, torch.float32, backend("cpu")), CONFIG)


def refused(at: Path, name: str, changes: dict[str, Any], key: str) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder_with(at, name, changes))
    said = str(caught.value)
    assert "\n" not in said
    assert key in said, said
    return said


EVERY = [
    ("rms_norm_eps", value) for value in (*NOT_POSITIVE, *NO_NUMBER, None, 2.0, 1e300)
] + [
    ("num_attention_heads", 3), ("num_key_value_heads", 3), ("head_dim", 1), ("layer_types", 5), ("layer_types", True),
    ("layer_types", ["full_attention"]), ("layer_types", ["chunked_attention"] * 4), ("sliding_window", "x"),
    ("sliding_window", -1), ("sliding_window", 1.5), ("rope_parameters", "x"), ("rope_parameters", [1]),
    ("rope_scaling", 3), ("model_type", "x"), ("model_type", None), ("dtype", "x"), ("dtype", 3), ("dtype", []),
    ("architectures", []), ("architectures", None), ("tie_word_embeddings", 3),
    ("max_position_embeddings", 3), ("num_hidden_layers", 1.5), ("vocab_size", True), ("auto_map", None),
    ("auto_map", False), ("is_encoder_decoder", "x"), ("quantization_config", "x"), ("text_config", {"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt-oss"])
@pytest.mark.parametrize(("key", "value"), EVERY, ids=lambda value: str(value)[:20])
def test_of_every_architecture(tmp_path: Path, name: str, key: str, value: Any) -> None:
    refused(tmp_path, name, {key: value}, "rope_" if key == "rope_scaling" else key)


ROPES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("mistral", LINEAR, ("factor", "rope_theta")),
    ("olmo2", DYNAMIC, ("factor", "rope_theta")),
    ("qwen2", {**YARN, "attention_factor": 1.2}, (
        "factor", "rope_theta", "attention_factor", "beta_fast", "beta_slow", "original_max_position_embeddings",
    )),
    ("gpt-oss", YARN, ("factor", "beta_fast")),
    ("granite", LLAMA3, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
]  # fmt: skip
BAD_ROPES = [
    (name, {**rope, key: value}, key)
    for name, rope, keys in ROPES
    for key in keys
    for value in (*NOT_POSITIVE, *NO_NUMBER, *FAR)
]


@pytest.mark.parametrize(("name", "rope", "key"), BAD_ROPES, ids=lambda value: str(value)[-40:])
def test_rotary_embeddings(tmp_path: Path, name: str, rope: dict[str, Any], key: str) -> None:
    said = refused(tmp_path, name, {"rope_parameters": rope}, key)
    assert repr(rope[key])[:10] in said or f"rope_parameters.{key}" in said, said


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("qwen2", {"rope_parameters": {**YARN, "truncate": "no"}}, "truncate"),
        ("qwen2", {"rope_parameters": {**YARN, "truncate": None}}, "truncate"),
        ("qwen2", {"rope_parameters": {**YARN, "rope_type": {}}}, "rope_"),
        *(("mistral", {"rope_parameters": {**rope, key: None}}, key) for rope, key in (
            (LINEAR, "factor"), (DYNAMIC, "factor"), (LLAMA3, "factor"), (LLAMA3, "low_freq_factor"),
            (LLAMA3, "high_freq_factor"),
        )),
        ("qwen2", {"rope_parameters": {**LINEAR, "rope_theta": None}}, "rope_theta"),
        ("gemma3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("gemma3", {"rope_parameters": {"full_attention": {**LINEAR, "factor": 1e-300}, "sliding_attention": LINEAR}},
         "factor"),
        ("phi3", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
        ("phi3", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 1e-300}}, "partial_rotary_factor"),
        ("phi3-longrope", {"rope_parameters": {**LONGROPE, "long_factor": [1e-300] * 6}}, "long_factor"),
        ("phi3-longrope", {"rope_parameters": {**LONGROPE, "short_factor": 3}}, "short_factor"),
        *(("granite", {key: value}, key) for value in (0, "x", [1], 1e300, 1e-300) for key in (
            "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
        )),
        *(("gemma2", {key: value}, key) for value in (0, "x", [1], 1e300, 1e-300) for key in (
            "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
        )),
        *(("gpt-oss", {key: value}, key) for value in (0, -1.0, "x", [1], True, 1e300) for key in (
            "swiglu_limit", "swiglu_alpha",
        )),
        ("gpt-oss", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("gpt-oss", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
        ("qwen3-moe", {"num_local_experts": None}, "num_local_experts"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("smollm3", {"no_rope_layers": []}, "no_rope_layers"),
        ("smollm3", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        ("gemma2", {"hidden_activation": "x"}, "hidden_activation"),
        ("gemma2", {"sliding_window": 0}, "sliding_window"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_of_one_architecture(tmp_path: Path, name: str, changes: dict[str, Any], key: str) -> None:
    refused(tmp_path, name, changes, key)


@pytest.mark.parametrize("name", MODELS)
def test_values_at_the_edge_of_what_is_taken_end_in_numbers(tmp_path: Path, name: str) -> None:
    """What is let through gives scores that are finite: the bounds are narrow enough."""
    rope = config_of(name)["rope_parameters"]
    changes = {key: value for key, value in (
        ("rms_norm_eps", 1.0), ("embedding_multiplier", 1e12), ("residual_multiplier", 1e12), ("logits_scaling", 1e-6),
        ("attention_multiplier", 1e12), ("attn_logit_softcapping", 1e12), ("final_logit_softcapping", 1e-6),
        ("query_pre_attn_scalar", 10**12), ("swiglu_limit", 1e12), ("swiglu_alpha", 1e12),
    ) if key in config_of(name)}  # fmt: skip
    if rope.get("rope_type") in ("yarn", "dynamic"):
        changes["rope_parameters"] = {**rope, "factor": 1e-6, "rope_theta": 1e12}
    made = load(folder_with(tmp_path, name, changes))
    made.add("a", prompt(40, VOCAB), max_tokens=3)
    made.run()
    assert len(made.tokens["a", 0]) == 3
    assert made.scores("a").isfinite().all()


def test_the_folders_are_taken_before_they_are_damaged(tmp_path: Path) -> None:
    for name in ("mistral", "gemma3", "gpt-oss"):
        (tmp_path / name).mkdir()
        folder = folder_with(tmp_path / name, name, {})
        assert isinstance(read_config(folder), ModelConfig)
        load(folder)
