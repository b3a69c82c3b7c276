"""The tests' own model and tokenizer do what they say."""

from __future__ import annotations

import pytest

from headrace.engine.types import Request, SamplingOptions
from tests.support.driver import driver
from tests.support.scripted import BOS, EOS, IM_END, IM_START, ByteTokenizer, ScriptedRunner, expected_output


def outputs(runner: ScriptedRunner, prompt: list[int], choice: int = 0, **options: object) -> list[int]:
    request = Request("a", tuple(prompt), SamplingOptions(**{"temperature": 0, "max_tokens": 12, **options}))  # type: ignore[arg-type]
    return expected_output(runner, request, choice)[0]


def test_hash_depends_on_the_whole_context_and_on_nothing_else_when_greedy() -> None:
    runner = ScriptedRunner()
    assert outputs(runner, [1, 2, 3]) == outputs(ScriptedRunner(), [1, 2, 3], seed=9)
    assert outputs(runner, [1, 2, 3]) != outputs(runner, [0, 2, 3])


def test_hash_above_temperature_zero_depends_on_seed_and_choice() -> None:
    runner = ScriptedRunner()
    seen = {
        tuple(outputs(runner, [1, 2], choice, temperature=1, seed=seed, n=2)) for seed in (1, 2) for choice in (0, 1)
    }
    assert len(seen) == 4
    assert outputs(runner, [1, 2], temperature=1, seed=1) == outputs(runner, [1, 2], temperature=1, seed=1)


def test_hash_ends_now_and_then() -> None:
    ends = [EOS in outputs(ScriptedRunner(), [number], max_tokens=30) for number in range(40)]
    assert 10 < sum(ends) < 40


def test_the_other_scripts() -> None:
    assert outputs(ScriptedRunner(script="echo"), [4, 5]) == [4, 5, EOS]
    assert outputs(ScriptedRunner(script=list(b"hi")), [4, 5]) == [*b"hi", EOS]
    assert outputs(ScriptedRunner(script=lambda sequence: sequence.num_tokens), [4, 5], max_tokens=3) == [2, 3, 4]
    with pytest.raises(ValueError, match="unknown script"):
        outputs(ScriptedRunner(script="nonsense"), [1])


def test_options_that_are_honoured() -> None:
    runner = ScriptedRunner(script=[])
    assert outputs(runner, [1], min_tokens=2) == [EOS + 1, EOS + 1, EOS]
    assert outputs(runner, [1], logit_bias={7: 100.0, 8: 60.0}, max_tokens=2) == [7, 7]
    assert outputs(runner, [1], logit_bias={7: 3.0}) == [EOS]


def test_the_engine_gives_what_the_script_says() -> None:
    for script in ("hash", "echo", [1, 2, 3]):
        drive = driver(script=script)
        drive.add("a", [5, 6, 7], temperature=1, n=2)
        drive.run()
        drive.assert_as_alone()


def test_a_step_may_take_time() -> None:
    drive = driver(step_time_s=0.01, script=[1])
    drive.add("a", [1])
    first = drive.step().outputs[0].first_scheduled_s
    second = drive.step()
    assert second.outputs[0].finish is not None
    assert drive.engine._clock() - first >= 0.02


def test_bytes_there_and_back() -> None:
    tokenizer = ByteTokenizer()
    text = "Wasserrad 水車 👩‍👩‍👧"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push((token_id,)) for token_id in tokenizer.encode("é水")]
    assert pieces == ["", "é", "", "", "水"]
    assert detokenizer.push((0xE6, 0xB0)) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_and_unknown_ids_give_no_text_and_no_error() -> None:
    detokenizer = ByteTokenizer().detokenizer()
    assert detokenizer.push((BOS, *b"a", EOS, IM_END, 99999, -5, *b"b")) == "ab"


def test_a_chat_has_marks_that_its_contents_cannot_forge() -> None:
    tokenizer = ByteTokenizer(add_bos=True)
    ids = tokenizer.encode_chat([{"role": "user", "content": "<|im_end|>"}])
    assert ids == [BOS, IM_START, *b"user\n<|im_end|>", IM_END, *b"\n", IM_START, *b"assistant\n"]
    assert tokenizer.encode_chat([], [{"name": "f"}], {"k": 1}) == [
        BOS, *b'[{"name": "f"}]{"k": 1}', IM_START, *b"assistant\n",
    ]  # fmt: skip
