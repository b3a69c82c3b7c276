"""Architectures that run through transformers' own code: what they give, in any batch."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine import LLM, Request, SamplingOptions
from headrace.engine.errors import ModelError, UnsupportedModelError, WeightsError
from headrace.engine.families import FAMILIES as NATIVE
from headrace.engine.load import load_runner, read_config
from headrace.engine.models.transformers_config import TransformersConfig, transformers_config
from headrace.engine.types import EngineConfig
from tests.support.checkpoints import tokenizer
from tests.support.foreign_families import FAMILIES, VOCAB, family_checkpoint, family_config, family_model
from tests.support.torch_rig import TorchRig, backend, prompt

# Scores of up to 20 from three layers of float32 in another order: the native decoder's tests allow the same.
CLOSE = 1e-4
BASE = EngineConfig(max_num_seqs=17, max_num_batched_tokens=13, block_size=4, num_kv_blocks=500, max_model_len=128)
LENGTHS = (1, 2, 3, 4, 5, 8, 12, 13, 14, 16, 17, 25, 31, 33, 40, 52, 65)
MAX_TOKENS = 8
TIGHT = {"num_kv_blocks": 24, "max_model_len": 80, "max_num_batched_tokens": 60, "enable_prefix_caching": False}
GREEDY = SamplingOptions(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
Changes = tuple[tuple[str, Any], ...]


def fallback_rig(
    family: str, changes: Changes = (), name: str = "cpu", dtype: torch.dtype = torch.float32, **config: Any
) -> TorchRig:
    folder, full = family_checkpoint(family, changes), replace(BASE, **config)
    model = read_config(folder)
    assert isinstance(model, TransformersConfig)
    return TorchRig(load_runner(folder, model, full, dtype, backend(name)), full)


def prompts_of(family: str) -> dict[str, list[int]]:
    return {f"{family} {length}": prompt(length, VOCAB, salt=length) for length in LENGTHS}


@cache
def alone(family: str, length: int, changes: Changes = ()) -> list[int]:
    """What transformers generates greedily after a prompt of its own."""
    ids = prompt(length, VOCAB, salt=length)
    made = family_model(family, changes).generate(
        torch.tensor([ids]), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=VOCAB + 1
    )
    return made[0, len(ids) :].tolist()


def assert_as_alone(made: TorchRig, family: str, prefix: str = "", changes: Changes = ()) -> None:
    for request_id, ids in prompts_of(family).items():
        tokens = made.tokens[prefix + request_id, 0]
        assert tokens == alone(family, len(ids), changes), f"{prefix}{request_id}"
        with torch.no_grad():
            want = family_model(family, changes)(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        off = (made.scores(prefix + request_id) - want).abs().max().item()
        assert off < CLOSE, f"{prefix}{request_id}: scores are off by {off:.2g}"


def run_all(made: TorchRig, family: str, prefix: str = "") -> TorchRig:
    for request_id, ids in prompts_of(family).items():
        made.add(prefix + request_id, ids, max_tokens=MAX_TOKENS)
    return made.run()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_cold_and_warm(family: str) -> None:
    made = run_all(fallback_rig(family), family)
    assert_as_alone(made, family)
    run_all(made, family, "warm ")
    assert_as_alone(made, family, "warm ")
    assert made.outputs[f"warm {family} 65", 0][0].cached_tokens == 64
    for length in (5, 33, 65):  # by itself, with nothing cached: the same bits
        ids = tuple(prompt(length, VOCAB, salt=length))
        made.engine.add(Request(f"one {length}", ids, GREEDY, cache_salt="none of the others'"))
        made.run()
        for other in (f"{family} {length}", f"warm {family} {length}"):
            assert torch.equal(made.scores(f"one {length}"), made.scores(other)), other


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_after_preemption(family: str) -> None:
    made = run_all(fallback_rig(family, **TIGHT), family)
    assert made.engine.stats().preemptions > 0
    assert_as_alone(made, family)


RELU: Changes = (("hidden_act", "relu"),)


def test_a_native_architecture_with_what_the_decoder_lacks_runs_as_well() -> None:
    assert "LlamaForCausalLM" in NATIVE
    assert_as_alone(run_all(fallback_rig("llama", RELU), "llama"), "llama", changes=RELU)


def test_sinks_run_as_well() -> None:
    assert_as_alone(run_all(fallback_rig("granite_swa"), "granite_swa"), "granite_swa")


def test_a_whole_engine_says_in_the_log_which_way_it_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "model"
    shutil.copytree(family_checkpoint("phi"), folder)
    tokenizer().save_pretrained(folder)
    with caplog.at_level("INFO", logger="headrace.engine.load"):
        llm = LLM(folder, replace(BASE, max_num_seqs=4))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "PhiForCausalLM runs through transformers' own code"
    ]
    ids = prompt(17, VOCAB, salt=17)
    assert list(llm.generate([ids], GREEDY)[0].token_ids) == alone("phi", 17)


def test_experts() -> None:
    assert_as_alone(run_all(fallback_rig("mixtral"), "mixtral"), "mixtral")


@pytest.mark.parametrize("name", ["cpu-onednn", "torch"])
def test_other_backends(name: str) -> None:
    assert_as_alone(run_all(fallback_rig("starcoder2", name=name), "starcoder2"), "starcoder2")


def test_prompt_log_probabilities() -> None:
    made, ids = fallback_rig("cohere"), prompt(40, VOCAB)
    made.add("a", ids, max_tokens=1, prompt_logprobs=0)
    made.run()
    got = [entry for output in made.outputs["a", 0] for entry in output.prompt_logprobs or ()]
    with torch.no_grad():
        want = family_model("cohere")(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert len(got) == 40
    assert got[0] is None
    for position, entry in enumerate(got[1:]):
        assert entry[0][0] == ids[position + 1]
        assert abs(entry[0][1] - want[position, ids[position + 1]].item()) < CLOSE


def test_bfloat16_and_an_int8_cache_are_near() -> None:
    # both round to 8 bits and more in each operation: scores agree to some hundredths of the largest
    ids = prompt(30, VOCAB)
    with torch.no_grad():
        want = family_model("phi")(torch.tensor([ids])).logits[0, -1]
    for options in ({"dtype": torch.bfloat16}, {"kv_cache_dtype": "int8"}):
        made = fallback_rig("phi", **options)
        made.add("a", ids, max_tokens=1)
        made.run()
        assert (made.scores("a")[0] - want).abs().max() < 0.05 * want.abs().max(), options


@pytest.mark.parametrize(("family", "most"), [("gpt2", 256), ("opt", 256)])
def test_learned_positions_bound_the_length(family: str, most: int) -> None:
    with pytest.raises(ModelError, match=f"more than the {most} positions"):
        fallback_rig(family, max_model_len=most + 1)
    made = fallback_rig(family, max_model_len=most, max_num_batched_tokens=64)
    ids = prompt(most - 2, VOCAB)
    made.add("to the end", ids, max_tokens=50)
    made.run()
    tokens = made.tokens["to the end", 0]
    with torch.no_grad():
        want = family_model(family)(torch.tensor([ids + tokens])).logits[0].argmax(-1)
    assert len(tokens) == 2
    assert tokens == want[len(ids) - 1 : -1].tolist()


def test_rotary_embeddings_that_change_beyond_their_original_length_end_there() -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    architecture, config = family_config("llama", rope_parameters=rope)
    assert transformers_config(architecture, config, frozenset()).max_position == 64


def changed_weights(tmp_path: Path, change: Any) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(family_checkpoint("phi"), folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda weights: weights.pop("model.layers.1.mlp.fc1.weight"), r"missing: model\.layers\.1\.mlp\.fc1\.weight"),
        (lambda weights: weights.update(spare=torch.zeros(3)), "unexpected: spare"),
        (
            lambda weights: weights.update({"model.layers.0.mlp.fc1.bias": torch.zeros(5)}),
            r"of another shape: model\.layers\.0\.mlp\.fc1\.bias is \[5\] instead of \[96\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, change: Any, why: str) -> None:
    folder = changed_weights(tmp_path, change)
    with pytest.raises(WeightsError, match=why):
        load_runner(folder, read_config(folder), BASE, torch.float32, backend("cpu"))


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"architectures": ["PhiForSequenceClassification"]}, "architectures"),
    ],
)
def test_what_no_model_may_be_stays_refused(tmp_path: Path, change: dict[str, Any], feature: str) -> None:
    folder = changed_weights(tmp_path, lambda _: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(folder)
    assert caught.value.feature == feature
