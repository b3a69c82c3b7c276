"""The offline interface: prompts in, completions out, the same as transformers' own generation."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.engine import LLM, EngineConfig, RequestRefusedError, SamplingOptions
from headrace.engine.errors import ModelError
from headrace.engine.threads import available_cores, configure_threads
from tests.support.checkpoints import SHAPES, Shape, checkpoint, reference_model, tokenizer
from tests.support.torch_rig import prompt

CONFIG = EngineConfig(max_num_seqs=8, max_num_batched_tokens=24, block_size=4, num_kv_blocks=80, max_model_len=200)
GREEDY = SamplingOptions(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(checkpoint(Shape()), CONFIG)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_tokens_are_those_of_transformers(shape: str) -> None:
    model, made = reference_model(SHAPES[shape]), LLM(str(checkpoint(SHAPES[shape])), CONFIG)
    prompts = [prompt(length, SHAPES[shape].vocab, salt=length) for length in (1, 3, 4, 5, 17, 40, 63, 90)]
    for ids, got in zip(prompts, made.generate(prompts, GREEDY), strict=True):
        out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
        assert list(got.token_ids) == out[len(ids) :]
        assert got.finish.reason == ("stop" if out[-1] == 1 else "length")


def test_text_prompts_and_results_in_order(llm: LLM) -> None:
    prompts = ["The water runs", "물은 흐른다", "def turn(wheel):", "🌊"]
    completions = llm.generate(prompts, GREEDY, progress=True)
    assert [one.prompt for one in completions] == [0, 1, 2, 3]
    for text, got in zip(prompts, completions, strict=True):
        assert got == replace(llm.generate([text], GREEDY)[0], prompt=got.prompt)
        assert got.text == tokenizer().decode(got.token_ids, skip_special_tokens=True)


def test_choices_logprobs_and_prompt_logprobs(llm: LLM) -> None:
    options = SamplingOptions(max_tokens=5, n=3, seed=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    got = llm.generate(["The wheel", "The stone"], options)
    assert [(one.prompt, one.choice) for one in got] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert all(len(one.token_ids) == len(one.logprobs) == 5 for one in got)
    assert [entry[0][0] for entry in got[0].logprobs] == list(got[0].token_ids)
    assert got[0].prompt_logprobs is not None
    assert got[0].prompt_logprobs[0] is None
    assert got[1].prompt_logprobs is None
    assert len({one.token_ids for one in got[:3]}) > 1


def test_a_stop_string_ends_a_choice_and_is_cut_off(llm: LLM) -> None:
    whole = llm.generate(["The water runs"], replace(GREEDY, ignore_eos=True))[0]
    stop = whole.text[4:7]
    cut = [replace(GREEDY, ignore_eos=True, stop=(stop,), include_stop=keep) for keep in (False, True)]
    got, kept, longer = llm.generate(["The water runs"] * 3, [*cut, replace(GREEDY, ignore_eos=True, max_tokens=30)])
    assert len(longer.token_ids) == 30  # still running when the others had ended
    assert got.text == whole.text[: whole.text.index(stop)]
    assert kept.text == got.text + stop
    assert (got.finish.reason, got.finish.stop) == ("stop", stop)
    assert not llm.engine.has_work


def test_the_beginning_of_a_stop_string_comes_out_at_the_end(llm: LLM) -> None:
    whole = llm.generate(["The water runs"], replace(GREEDY, ignore_eos=True))[0]
    held = replace(GREEDY, ignore_eos=True, stop=(whole.text[-1] + "\x00",))
    assert llm.generate(["The water runs"], held)[0].text == whole.text


def test_prompts_without_options_get_seeds_of_their_own(llm: LLM) -> None:
    ids = prompt(10, 320)
    assert len({one.token_ids for one in llm.generate([ids] * 6)}) > 1
    seeded = SamplingOptions(max_tokens=8, seed=1)
    assert len({one.token_ids for one in llm.generate([ids] * 3, seeded)}) == 1
    assert len({one.token_ids for one in llm.generate([ids] * 6, [replace(seeded, seed=n) for n in range(6)])}) > 1


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestRefusedError):
        llm.generate(["fine", prompt(500, 320)], GREEDY)
    assert not llm.engine.has_work
    with pytest.raises(RequestRefusedError, match="vocabulary"):
        llm.generate(["x"], SamplingOptions(stop_token_ids=(151_645,)))
    with pytest.raises(ValueError, match="2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    assert len(llm.generate(["fine"], GREEDY)) == 1


def test_a_model_that_cannot_be_loaded_says_so_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        LLM(tmp_path, CONFIG)
    assert str(caught.value).count(".") <= 2
    assert "\n" not in str(caught.value)


def test_the_examples_of_the_documentation_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block.replace("assets/demo-model", str(checkpoint(Shape()))), {})  # noqa: S102
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("('b', 1) ") for line in lines)
    assert any(line.split()[:2] == ["1", "length"] or line.split()[:2] == ["1", "stop"] for line in lines)


def test_threads() -> None:
    before = torch.get_num_threads()
    assert configure_threads(2) == 2
    assert configure_threads() == available_cores()
    with pytest.raises(ValueError, match="at least 1"):
        configure_threads(0)
    torch.set_num_threads(before)


def test_configuring_threads_first_makes_idle_ones_sleep() -> None:
    code = (
        "import os, sys; os.environ.pop('OMP_WAIT_POLICY', None)\n"
        "from headrace.engine.threads import configure_threads; assert 'torch' not in sys.modules\n"
        "print(configure_threads(1), os.environ['OMP_WAIT_POLICY'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "passive"]
