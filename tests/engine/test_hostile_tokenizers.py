"""Tokenizers and templates that mean harm, or are none: each is one clear error of ours."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.load import load_engine
from headrace.engine.tokenizer import load_tokenizer
from headrace.engine.types import RequestRefusedError
from tests.support.hostile import CONFIG, damageable_folder, edit, refused

__all__ = ["damageable_folder"]  # a fixture


def test_a_tokenizer_with_more_ids_than_the_model_has_rows(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {**tokenizer["added_tokens"][0], "content": "<extra>", "id": 320}
    tokenizer["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(folder, r"ids up to 320, .* only 320 rows \(vocab_size\)")


@pytest.mark.parametrize("change", [{"added_tokens": 3}, {"model": None}, {"decoder": {"type": "Evil"}}])
def test_a_tokenizer_that_is_damaged(folder: Path, change: dict[str, Any]) -> None:
    edit(folder / "tokenizer.json", **change)
    refused(folder, "tokenizer")


@pytest.mark.parametrize("text", ["null", "[]", '{"model": null}', "{}", '{"version": "1.0", "added_tokens": []}'])
def test_a_tokenizer_file_that_holds_no_tokenizer(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    refused(folder, r"cannot be loaded: .*/tokenizer\.json (holds no JSON object|has no object under model)")


def test_further_chat_templates_are_bounded_and_files(folder: Path) -> None:
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    for name in "ab":
        with (templates / f"{name}.jinja").open("wb") as file:
            os.truncate(file.fileno(), 9 << 20)  # each alone would do
    refused(folder, "additional_chat_templates has .* 16 MiB")
    (templates / "a.jinja").unlink()
    (templates / "b.jinja").unlink()
    os.mkfifo(templates / "c.jinja")
    refused(folder, r"additional_chat_templates/c\.jinja is no file")


def test_further_chat_templates_tell_models_apart(folder: Path) -> None:
    """As transformers has it: the one called default takes the place of the tokenizer's own."""
    load = lambda: load_engine(folder, CONFIG)[1:]  # noqa: E731
    _, plain = load()
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "default.jinja").write_text("HELLO")
    tokenizer, one = load()
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]) == tokenizer.encode("HELLO")
    (templates / "default.jinja").write_text("HALLO")
    _, other = load()
    assert len({plain.fingerprint, one.fingerprint, other.fingerprint}) == 3


PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def with_tokenizer(folder: Path, **changes: Any) -> Path:
    edit(folder / "tokenizer.json", **changes)
    return folder


def test_a_panic_at_load_is_an_error(folder: Path) -> None:
    refused(with_tokenizer(folder, normalizer=PRECOMPILED), "tokenizer .* cannot be loaded: Precompiled")


def test_a_panic_at_a_prompt_is_the_refusal_of_a_request(folder: Path) -> None:
    tokenizer = load_tokenizer(with_tokenizer(folder, pre_tokenizer=BACKTRACKING))
    with pytest.raises(RequestRefusedError, match=r"cannot encode the text: .*retry-limit") as caught:
        tokenizer.encode("a" * 40 + "b")
    assert caught.value.code == "internal"
    assert tokenizer.encode("b")


def test_ids_that_every_prompt_would_have_and_the_model_has_not(folder: Path) -> None:
    edit(folder / "tokenizer.json", post_processor={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}], "pair": [],
        "special_tokens": {"<x>": {"id": "<x>", "ids": [99_999], "tokens": ["<x>"]}},
    })  # fmt: skip
    refused(folder, "ids up to 99999, .* only 320 rows")


def replaced(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(name: str, *steps: object) -> dict[str, object]:
    return {"type": "Sequence", name: list(steps)}


TWICE = replaced({"String": "a"}, "aa")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TWENTY_TEXTS: dict[str, object] = {
    "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 20, "pair": [],
    "special_tokens": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", sequence("normalizers", *[TWICE] * 40)),
        ("normalizer", replaced({"Regex": ""}, "a" * 2000)),
        ("pre_tokenizer", sequence("pretokenizers", sequence("pretokenizers", *[BYTES] * 20))),
        ("post_processor", sequence("processors", *[TWENTY_TEXTS] * 3)),
        ("decoder", sequence("decoders", *[TWICE] * 40)),
    ],
)
def test_texts_that_would_grow_without_end(folder: Path, part: str, value: object) -> None:
    refused(with_tokenizer(folder, **{part: value}), f"the {part} in .*tokenizer.json may make a text more than")


def test_steps_that_shorten_or_keep_a_text_are_as_many_as_there_are(folder: Path) -> None:
    steps = [replaced({"String": "ab"}, "c"), replaced({"Regex": "x+"}, "")] * 50
    load_tokenizer(with_tokenizer(folder, normalizer=sequence("normalizers", *steps)))
