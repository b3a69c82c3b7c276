"""Every architecture against transformers: tokens and scores, however requests meet, in pieces and after preemption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace.engine.config import read_model_config
from headrace.engine.errors import ModelError, UnsupportedModelError
from headrace.engine.load import load_engine
from headrace.engine.types import EngineConfig
from tests.support.families import LAYERS, MODELS, ORIGINAL, VOCAB, WINDOW, family_checkpoint, family_reference
from tests.support.tolerances import INSIDE
from tests.support.torch_rig import TorchRig, prompt, rig

LENGTHS = (1, 2, 5, 9, 16, 17, 23, 24, 25, 31, 32, 33, 40, 47, 48, 49, 57)  # all past the windows, but for the first
TOKENS = 6
FAMILIES = pytest.mark.parametrize("name", MODELS)


def family_rig(name: str, backend: str = "cpu", dtype: torch.dtype = torch.float32, **config: object) -> TorchRig:
    """A rig whose longest text is not stretched, so that transformers computes the same at every length."""
    return rig(family_checkpoint(name), backend, dtype, **{"max_model_len": ORIGINAL, **config})


def prompts(*lengths: int) -> dict[str, list[int]]:
    return {str(length): prompt(length, VOCAB, salt=length) for length in lengths}


def run(made: TorchRig, wanted: dict[str, list[int]], **options: object) -> TorchRig:
    for request_id, ids in wanted.items():
        made.add(request_id, ids, **{"max_tokens": TOKENS, **options})
    return made.run()


def assert_as_transformers(made: TorchRig, name: str, wanted: dict[str, list[int]]) -> None:
    """Every token is the one that transformers scores best after the same text, and every score is near its own.

    Each layer, and the scoring, may add what one operation of it rounds.
    """
    for request_id, ids in wanted.items():
        tokens = made.tokens[request_id, 0]
        with torch.no_grad():
            scores = family_reference(name)(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        off = (made.scores(request_id) - scores).abs().max().item()
        assert off <= (LAYERS + 1) * INSIDE * scores.abs().max(), f"{request_id}: scores are off by {off:.2g}"
        assert tokens == scores.argmax(-1).tolist(), request_id


@FAMILIES
def test_tokens_are_those_that_transformers_generates(name: str) -> None:
    wanted = prompts(3, 30, 57)
    made = run(family_rig(name), wanted)
    made.runner.on_logits = None
    for request_id, ids in wanted.items():
        made.add(f"{request_id} unwatched", ids, max_tokens=TOKENS)
    made.run()
    for request_id, ids in wanted.items():
        inputs = torch.tensor([ids])
        got = family_reference(name).generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )[0, len(ids) :]
        assert made.tokens[request_id, 0] == got.tolist()
        assert made.tokens[f"{request_id} unwatched", 0] == got.tolist()


@FAMILIES
def test_a_batch_of_mixed_lengths_then_warm(name: str) -> None:
    wanted = prompts(*LENGTHS)
    made = run(family_rig(name), wanted)
    assert_as_transformers(made, name, wanted)
    warm = {f"{request_id} warm": ids for request_id, ids in wanted.items()}
    run(made, warm)
    assert sum(made.outputs[request_id, 0][0].cached_tokens for request_id in warm) > 300
    for request_id in wanted:
        assert torch.equal(made.scores(f"{request_id} warm"), made.scores(request_id))


@FAMILIES
def test_in_chunks_and_after_preemption_nothing_changes_by_a_bit(name: str) -> None:
    wanted = prompts(5, 25, 33, 40)
    whole = run(family_rig(name), wanted, max_tokens=24)
    cut = run(family_rig(name, max_num_batched_tokens=7, max_num_seqs=3), wanted, max_tokens=24)
    few = 36 if whole.runner.num_blocks else 18  # with a window in every layer no sequence takes many
    tight = run(family_rig(name, num_kv_blocks=few), wanted, max_tokens=24)
    assert tight.engine.stats().preemptions > 0
    for request_id in wanted:
        assert torch.equal(cut.scores(request_id), whole.scores(request_id))
        assert torch.equal(tight.scores(request_id), whole.scores(request_id))


@FAMILIES
@pytest.mark.parametrize("backend", ["cpu-onednn", "torch"])
def test_other_backends(name: str, backend: str) -> None:
    wanted = prompts(9, 33, 50)
    assert_as_transformers(run(family_rig(name, backend), wanted), name, wanted)


@FAMILIES
def test_bfloat16_is_near(name: str) -> None:
    # both round to 8 bits after each operation, at other places; the largest scores agree to a few units of 2⁻⁵
    wanted = prompts(40)
    made = run(family_rig(name, dtype=torch.bfloat16), wanted)
    with torch.no_grad():
        want = family_reference(name)(torch.tensor([wanted["40"]])).logits[0, -1]
    assert (made.scores("40")[0] - want).abs().max() < 0.08 * want.abs().max()


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("llama-dynamic", "phi3-longrope")])
def test_texts_of_many_windows(name: str) -> None:
    wanted = prompts(8 * WINDOW, 8 * WINDOW + 5)
    made = run(family_rig(name, max_model_len=256, max_num_batched_tokens=100), wanted)
    assert_as_transformers(made, name, wanted)


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope"])
def test_beyond_the_original_length_factors_are_those_of_the_longest_text(name: str) -> None:
    # transformers takes those of the text as it is: the same once the text is as long as it can be
    length = 200 if name == "llama-dynamic" else ORIGINAL + 5
    wanted = prompts(length)
    made = family_rig(name, max_model_len=200 + 1)
    made.add(str(length), wanted[str(length)], max_tokens=1)
    made.run()
    with torch.no_grad():
        ids = wanted[str(length)] + made.tokens[str(length), 0]
        scores = family_reference(name)(torch.tensor([ids])).logits[0, -2]
    off = (made.scores(str(length))[0] - scores).abs().max()
    assert off <= (LAYERS + 1) * INSIDE * scores.abs().max()


@pytest.mark.parametrize(
    ("name", "alike"), [("phi3-longrope", (60, 64)), ("phi3-longrope", (65, 66)), ("llama-dynamic", (60, 64))]
)
def test_a_model_is_another_one_where_its_longest_text_changes_what_it_says(name: str, alike: tuple[int, int]) -> None:
    def fingerprint(longest: int) -> str:
        return load_engine(family_checkpoint(name), EngineConfig(max_model_len=longest, num_kv_blocks=20))[
            2
        ].fingerprint

    first, second = map(fingerprint, alike)
    assert first == second
    assert fingerprint(70 if alike[1] <= ORIGINAL else 50) != first


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_log_probabilities_are_of_the_models_own_scores(name: str) -> None:
    # caps and divisors change no best token, but every probability
    ids = prompt(20, VOCAB)
    made = family_rig(name)
    made.runner.on_logits = None
    made.add("a", ids, max_tokens=1, logprobs=2, prompt_logprobs=0)
    made.run()
    output = made.outputs["a", 0][0]
    with torch.no_grad():
        want = family_reference(name)(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert output.logprobs[0][0][1] == pytest.approx(want[-1].max().item(), abs=1e-4)
    got = [entry[0][1] for entry in output.prompt_logprobs if entry]
    assert got == pytest.approx([want[at, ids[at + 1]].item() for at in range(19)], abs=1e-4)


@pytest.mark.parametrize(
    ("feature", "change"),
    [
        ("decoder_sparse_step", {"decoder_sparse_step": 2}),
        ("mlp_only_layers", {"mlp_only_layers": [1]}),
        ("moe_intermediate_size", {"moe_intermediate_size": 72}),
        ("hidden_size", {"hidden_size": 72}),
    ],
)
def test_mixtures_that_are_refused(tmp_path: Path, feature: str, change: dict[str, object]) -> None:
    config = json.loads((family_checkpoint("qwen3-moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedModelError) as caught:
        read_model_config(tmp_path)
    assert caught.value.feature == feature


def test_windows_without_a_size_and_more_experts_than_there_are_are_no_configuration(tmp_path: Path) -> None:
    for name, change in (("gemma2", {"sliding_window": 0}), ("mixtral", {"num_experts_per_tok": 5})):
        config = json.loads((family_checkpoint(name) / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError, match=r"sliding_window = 0|num_experts_per_tok = 5"):
            read_model_config(tmp_path)
