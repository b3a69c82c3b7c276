"""Tiny tokenizers of each kind, made here in milliseconds, and the directories that hold them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the user asked the assistant for an end to the story",
    "안녕하세요 세계, 오늘은 날씨가 좋네요. 안녕히 가세요",
    "if x < 3: return [1, 2, 3]  # a list | of numbers",
    "👩‍👩‍👧 family 🇰🇷 flag 👍🏽 thumb",
    "STOP, he said. im_end think tool_call system",
] * 20
UNKNOWN, CLASSIC_UNKNOWN = "<unk>", "[UNK]"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
ADDED = [
    AddedToken("<think>", normalized=False),
    AddedToken("</think>", normalized=False),
    AddedToken("<tool_call>", normalized=True),
    AddedToken("</tool_call>", normalized=True),
    AddedToken("    ", normalized=True),
    AddedToken("<b>", normalized=False),
    AddedToken("é", normalized=False),  # written in the byte alphabet, where it means one byte
    AddedToken("<x y>", normalized=False),  # not written in the byte alphabet
]


@functools.cache
def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: the bytes of the text under another alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(ADDED)
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: characters, and `<0x..>` tokens for what the vocabulary lacks."""
    words = ["▁the", "▁end", "▁user", "he", "▁t", "en", "er", "▁e", "▁u", "us", "안", "녕", "end"]
    chars = sorted({c for line in CORPUS for c in line if c.isascii() and c != " "} | {"▁"})
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *chars, *words]
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he"), ("e", "n"), ("▁", "e"), ("en", "d"), ("▁", "u"), ("u", "s")]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *SPECIAL])
    tokenizer.add_tokens(ADDED[:2])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@functools.cache
def wordpiece() -> Tokenizer:
    """As BERT: `##` goes on with the word, and the decoder cleans up spaces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=CLASSIC_UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    tokenizer.add_tokens(["n't", ".", "'s", " do not"])
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """As T5 and XLM-R: a unigram model whose vocabulary holds its control tokens as ordinary entries."""
    chars = sorted({c for line in CORPUS for c in line if c != " "} | set("<>/|_"))
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁the", -2.5), ("en", -3.0), ("▁▁", -4.0)]
    tokenizer = Tokenizer(models.Unigram([*pieces, *[(c, -6.0) for c in chars if c != "▁"]], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


@functools.cache
def plain_words() -> Tokenizer:
    """No decoder at all: tokens are joined by blanks."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "bc": 2, "<|x|>": 3, "": 4}, unk_token=UNKNOWN))
    tokenizer.add_special_tokens(["<|x|>"])
    return tokenizer


@functools.cache
def word_ends() -> Tokenizer:
    """As GPT-1: `</w>` ends a word; what a token adds depends on whether one follows. Needs the window."""
    vocab = {"a": 0, "b</w>": 1, "c": 2, "d</w>": 3, ".</w>": 4, "<s>": 5, "안</w>": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@functools.cache
def odd_sequence() -> Tokenizer:
    """A byte-level decoder inside a sequence that no table covers: the window over bytes."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("zzzz", "y")])
    return tokenizer


def save(raw: Tokenizer, path: Path, chat_template: str | None = None, config: dict[str, Any] | None = None) -> Path:
    """A model directory with this tokenizer and template, as transformers saves them."""
    path.mkdir(parents=True, exist_ok=True)
    raw.save(str(path / "tokenizer.json"))
    content: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    if chat_template is not None:
        content["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(content))
    return path
