"""Settings of well-known checkpoints: positions, and a narrow model of each, are as transformers has them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from headrace.engine.config import ExpertsConfig, LayerConfig, ModelConfig, read_model_config
from headrace.engine.models.rotary import rotary_table
from headrace.engine.rope import RopeConfig
from headrace.kernels.gated import Clamp
from tests.support.families import draw
from tests.support.published import PUBLISHED, WHOLE
from tests.support.tolerances import INSIDE
from tests.support.torch_rig import prompt, rig

NAMES = pytest.mark.parametrize("name", PUBLISHED)
ONE_ROPE = pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "Gemma-3-4B"])
LAYERS = {
    "Gemma-2-9B": (LayerConfig(4096), LayerConfig()),
    "Gemma-3-4B": (LayerConfig(1024, 1), LayerConfig()),
    "Mistral-7B-v0.1": (LayerConfig(4096),) * 2,
    "Phi-3-mini-128k": (LayerConfig(262_144),) * 2,
    "SmolLM3-3B": (LayerConfig(), LayerConfig(rope=None)),
    "gpt-oss-20b": (LayerConfig(128), LayerConfig()),
}


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return tmp_path


def model_of(folder: Path) -> Any:
    """The model with weights that are not drawn yet."""
    with no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.tie_weights()
    return model


@NAMES
def test_windows(name: str, folder: Path) -> None:
    assert read_model_config(folder).layers == LAYERS.get(name, (LayerConfig(),) * 2)


@ONE_ROPE
def test_rotary_tables_to_the_last_position(name: str, folder: Path) -> None:
    with torch.device("meta"):
        model = model_of(folder)
    config = read_model_config(folder)
    most = config.max_position
    rotary = type(model.model.rotary_emb)(model.config)
    positions = torch.cat((torch.arange(0, min(2 * 4096, most), 7), torch.arange(most - 4096, most)))
    table = rotary_table(config.ropes[0], config.head_dim, most)[positions]
    cos, sin = (part[0, :, : table.shape[1] // 2] for part in rotary(torch.zeros(1), positions.unsqueeze(0)))
    # two products of one rounding each lie between a frequency and its angle; where those are blended, some more
    angles = positions.unsqueeze(1) * rotary.inv_freq
    allowed = 4 * 2.0**-24 * angles + 4 * 2.0**-24
    assert ((table[:, : cos.shape[1]] - cos).abs() <= allowed).all()
    assert ((table[:, cos.shape[1] :] - sin).abs() <= allowed).all()


@NAMES
def test_a_narrow_model(name: str, folder: Path) -> None:
    model = draw(model_of(folder))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    ids = prompt(70, 320)
    made = rig(folder, max_num_batched_tokens=33)
    made.add("a", ids, max_tokens=4)
    made.run()
    with torch.no_grad():
        scores = model(torch.tensor([ids + made.tokens["a", 0]])).logits[0, len(ids) - 1 : -1]
    assert (made.scores("a") - scores).abs().max() <= 3 * INSIDE * scores.abs().max()  # as test_families has it
    assert made.tokens["a", 0] == scores.argmax(-1).tolist()


def test_configurations_in_the_layout_of_their_time(tmp_path: Path) -> None:
    def read(name: str) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(WHOLE[name]))
        return read_model_config(tmp_path)

    def plain(theta: float, longest: int) -> RopeConfig:
        return RopeConfig("default", theta, original_max_position=longest)

    mistral = read("Mistral-7B-v0.1")
    assert mistral.layers == (LayerConfig(4096, 0),) * 32
    assert (mistral.dtype, mistral.qkv_bias, mistral.head_dim) == ("bfloat16", False, 128)
    gemma = read("Gemma-3-1B")
    assert gemma.ropes == (plain(1e6, 32_768), plain(1e4, 32_768))
    assert gemma.layers == (*((LayerConfig(512, 1),) * 5 + (LayerConfig(0, 0),)) * 4, *(LayerConfig(512, 1),) * 2)
    assert (gemma.scale, gemma.embedding_scale, gemma.activation) == (1 / 16, 1152**0.5, "gelu")
    assert (gemma.tie_word_embeddings, gemma.soft_cap, gemma.logits_soft_cap) == (True, 0.0, 0.0)
    smol = read("SmolLM3-3B")
    assert [layer.rope for layer in smol.layers] == [0, 0, 0, None] * 9
    assert (smol.ropes, smol.tie_word_embeddings) == ((plain(5e6, 65_536),), True)
    qwen = read("Qwen3-30B-A3B")
    assert (qwen.experts, qwen.intermediate_size, qwen.head_dim) == (ExpertsConfig(128, 8, True), 768, 128)
    assert qwen.layers == (LayerConfig(0, 0),) * 48
    gpt_oss = read("gpt-oss-20b")
    assert gpt_oss.layers == (LayerConfig(128), LayerConfig()) * 12
    assert (gpt_oss.mxfp4, gpt_oss.dtype, gpt_oss.qkv_bias, gpt_oss.out_bias) == (True, "bfloat16", True, True)
    assert gpt_oss.experts == ExpertsConfig(32, 4, True, Clamp(1.702, 7.0))
    assert gpt_oss.ropes[0].attention_factor == pytest.approx(0.1 * math.log(32.0) + 1.0)
    assert (gpt_oss.ropes[0].kind, gpt_oss.ropes[0].truncate, gpt_oss.eos_token_ids) == ("yarn", False, {200_002})
    granite = read("Granite-3.1-2B")
    assert (granite.scale, granite.embedding_scale, granite.residual_scale) == (1 / 64, 12.0, 0.22)
    assert (granite.logits_divisor, granite.head_dim) == (8.0, 64)
