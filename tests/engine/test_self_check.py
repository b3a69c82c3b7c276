"""Who passes the check that an architecture computes through the bridge what it does by itself, and who does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace.engine.errors import UnsupportedModelError
from headrace.engine.models.attention_bridge import PagedStep, attend
from headrace.engine.models.self_check import MOST_PARAMETERS, self_check
from headrace.engine.models.shrink import shrunk
from headrace.engine.models.transformers_config import transformers_config
from headrace.kernels.backend import Backend
from tests.support.foreign_families import FAMILIES, family_config
from tests.support.torch_rig import backend

REFUSED = (
    ("bloom", "never calls the attention"), ("falcon", "no attention but its own"), ("mamba", "state of another kind"),
    ("recurrent_gemma", "state of another kind"), ("qwen3_next", "state of another kind"),
    ("stablelm", "do not hand their arguments on"),
    ("llama4_text", "neither causal nor a causal window"), ("deepseek_v3", "differ in shape"),
)  # fmt: skip


@pytest.mark.parametrize(("family", "why"), REFUSED)
def test_who_is_refused_and_why(family: str, why: str) -> None:
    architecture, config = family_config(family)
    with pytest.raises(UnsupportedModelError, match=rf"\({architecture}\) cannot run.*{why}"):
        self_check(transformers_config(architecture, config, frozenset()), backend("cpu"))


def test_masks_are_asked_about_the_longest_text_of_the_whole_model() -> None:
    """Chunks that are longer than every text of the small copy."""
    architecture, config = family_config("llama4_text", attention_chunk_size=2048, max_position_embeddings=8192)
    with pytest.raises(UnsupportedModelError, match="neither causal nor a causal window"):
        self_check(transformers_config(architecture, config, frozenset()), backend("cpu"))


def test_models_beside_the_text_s_are_built_small() -> None:
    config = CONFIG_MAPPING["phi4_multimodal"]()
    made = transformers_config("Phi4MultimodalForCausalLM", config, frozenset())
    assert made.num_built(type(config)(**shrunk(config))) < MOST_PARAMETERS


def broken(made: Backend, what: str) -> Backend:
    """A backend with a flaw in its attention."""

    def attention(
        q: Any, k: Any, v: Any, paging: Any, scale: float, window: int, soft_cap: float, sinks: Any, *more: Any
    ) -> Any:
        if what == "window" and window:
            window += 1
        if what == "no window":
            window = 0
        if what == "scale":
            scale *= 1.01
        if what == "cap":
            soft_cap = 0.0
        if what == "sinks":
            sinks = None
        return made.paged_attention(q, k, v, paging, scale, window, soft_cap, sinks, *more)

    def store(qkv: Any, positions: Any, cos_sin: Any, keys: Any, values: Any, slots: Any, **more: Any) -> Any:
        slots = slots.roll(1) if what == "slots" else slots
        return made.rotate_and_store(qkv, positions, cos_sin, keys, values, slots, **more)

    return replace(made, paged_attention=attention, rotate_and_store=store)


@pytest.mark.parametrize("what", ["window", "no window", "scale", "slots", "sinks"])
def test_the_self_check_finds_a_flaw(what: str) -> None:
    architecture, config = family_config("granite_swa" if what == "sinks" else "starcoder2")
    model = transformers_config(architecture, config, frozenset())
    self_check(model, broken(backend("cpu"), "nothing"))
    with pytest.raises(UnsupportedModelError, match=r"differ from transformers' own by"):
        self_check(model, broken(backend("cpu"), what))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"s_aux": torch.zeros(3)}, r"sinks \[3\] for 4 heads"),
        ({"position_bias": torch.zeros(4)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "looks ahead"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "mask of its own"),
        ({"headrace_step": None}, "do not hand their arguments on"),
    ],
)
def test_the_bridge_drops_nothing_in_silence(given: dict[str, Any], why: str) -> None:
    class Step:
        check_mask = PagedStep.check_mask

        def attend(self, *given: Any) -> torch.Tensor:
            return given[1][0][0].transpose(0, 1)

    query = torch.randn(1, 4, 3, 8)
    arguments = {"attention_mask": None, "headrace_step": Step(), "dropout": 0.0, "position_ids": torch.arange(3)}
    assert torch.equal(attend(torch.nn.Identity(), query, query, query, **arguments)[0], query.transpose(1, 2))
    with pytest.raises(UnsupportedModelError, match=why):
        attend(torch.nn.Identity(), query, query, query, **{**arguments, **given})


def test_the_page_of_models_says_what_the_check_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    checked, refused = page.split("## Through transformers' code")[1].split("## Refused")
    assert "| gpt_oss | `GptOssForCausalLM` |" in page.split("## Through transformers' code")[0]
    for family, (architecture, _) in FAMILIES.items():
        assert f"| {family} | `{architecture}` |" in checked
    for family, _ in REFUSED:
        assert f"| {family} | `{family_config(family)[0]}` |" in refused
