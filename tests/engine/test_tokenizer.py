"""Loading a tokenizer, and text to ids and back with it."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from headrace.engine.chat import ChatTemplateError
from headrace.engine.errors import ModelError
from headrace.engine.tokenizer import ModelTokenizer, TokenizerError, load_tokenizer
from headrace.engine.types import RequestRefusedError
from headrace.engine.types import Tokenizer as TokenizerProtocol
from tests.support import tokenizer_zoo as zoo
from tests.support.demo_worker import DEMO_MODEL


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "tiny-llama"
    return zoo.save(zoo.byte_fallback(), path, config={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="module")
def llama(llama_dir: Path) -> ModelTokenizer:
    return load_tokenizer(llama_dir)


def test_what_is_known_of_it(llama: ModelTokenizer) -> None:
    as_protocol: TokenizerProtocol = llama
    assert (llama.name, llama.bos_id, llama.eos_id, llama.has_chat_template) == ("tiny-llama", 1, 2, False)
    assert as_protocol.vocab_size == 1 + max(llama.raw.get_vocab().values())
    assert {0, 1, 2} < llama.special_ids
    assert llama.raw.token_to_id("<think>") not in llama.special_ids


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30) | st.lists(st.sampled_from([*zoo.SPECIAL, "<s>", " ", "end", "안"])).map("".join))
def test_text_gets_the_ids_that_transformers_gives(llama: ModelTokenizer, llama_dir: Path, text: str) -> None:
    """With BOS, and special-token text parsed as special tokens."""
    pretrained = AutoTokenizer.from_pretrained(str(llama_dir))
    assert llama.encode(text) == pretrained(text).input_ids


def test_special_text_in_a_prompt_is_special(llama: ModelTokenizer) -> None:
    assert llama.raw.token_to_id("<|im_end|>") in llama.encode("a<|im_end|>b")
    assert llama.encode("")[0] == llama.bos_id


def test_there_and_back(llama: ModelTokenizer) -> None:
    text = "the end 안녕 👩‍👩‍👧 \ufffd."
    detokenizer = llama.detokenizer()
    assert "".join(detokenizer.push((i,)) for i in llama.encode(text)) + detokenizer.flush() == text


def test_padding_and_truncation_in_the_file_do_not_apply(tmp_path: Path) -> None:
    raw = type(zoo.byte_fallback()).from_str(zoo.byte_fallback().to_str())
    raw.enable_truncation(4)
    raw.enable_padding(length=32)
    tokenizer = load_tokenizer(zoo.save(raw, tmp_path))
    assert tokenizer.encode("the end of the user") == zoo.byte_fallback().encode("the end of the user").ids


def test_a_lone_surrogate_is_refused(llama: ModelTokenizer) -> None:
    with pytest.raises(RequestRefusedError, match="surrogate") as refused:
        llama.encode("a\ud83d")
    assert (refused.value.code, refused.value.param) == ("invalid_request", "prompt")


def test_what_the_vocabulary_cannot_say_is_an_error_of_ours(tmp_path: Path) -> None:
    raw = Tokenizer(models.WordLevel({"a": 0}, unk_token=zoo.UNKNOWN))
    with pytest.raises(RequestRefusedError, match="cannot encode") as refused:
        load_tokenizer(zoo.save(raw, tmp_path)).encode("b")
    assert refused.value.code == "internal"


def test_without_a_template_chats_are_unsupported(llama: ModelTokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template") as refused:
        llama.encode_chat([{"role": "user", "content": "hi"}])
    assert (refused.value.code, refused.value.param) == ("unsupported", "messages")


def test_errors_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"none of tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(TokenizerError, match="cannot be loaded") as error:
        load_tokenizer(tmp_path)
    assert isinstance(error.value, ModelError)
    assert isinstance(error.value, ValueError)


def test_code_of_the_model_never_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    zoo.save(zoo.byte_fallback(), tmp_path, config={"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}})
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    with contextlib.suppress(TokenizerError):  # a refusal is as good as what the files alone give
        load_tokenizer(tmp_path)
    assert not mark.exists()


def test_threads_may_encode_at_once(llama: ModelTokenizer) -> None:
    texts = [f"the end of user {i} 안녕 " * 20 for i in range(40)]
    expected = [llama.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(llama.encode, texts)) == expected


def test_a_long_prompt_lets_other_threads_run() -> None:
    """Steps and renewals of leases go on beside the encoding of megabytes."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        text = "Once upon a time " * 60_000
        before = ticks
        ids = tokenizer.encode(text)
        during = ticks - before
    finally:
        stop.set()
        thread.join()
    assert len(ids) > 60_000
    assert during >= 10  # none at all, and one at the edge, where the interpreter's lock is held
