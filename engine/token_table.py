"""Which detokenizer a tokenizer needs, worked out once from its own decoder.

| decoder                                                        | detokenizer                             |
|----------------------------------------------------------------|-----------------------------------------|
| byte level (GPT-2, Llama 3, Qwen, DeepSeek)                    | pieces: bytes                           |
| replace …, byte fallback, fuse, strip (Llama 2, Mistral, Gemma)| pieces: text, and bytes for `<0x..>`    |
| metaspace (T5, XLM-R), WordPiece (BERT), none                  | pieces: the first and the later ones    |
| any other                                                      | window                                  |

With byte fallback the `tokenizers` library turns a whole run of byte tokens into U+FFFDs if any of it is no UTF-8; here
the good part stays, since it is already out. All else equals its `decode(ids, skip_special_tokens=True)`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from .detokenize import PieceDetokenizer, PieceTable, WindowDetokenizer, byte_pieces
from .types import Detokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_Step = dict[str, Any]


def detokenizer_factory(raw: Tokenizer) -> Callable[[], Detokenizer]:
    """A function that makes fresh detokenizers for `raw`, which must not change afterwards."""
    tokens = visible_tokens(raw)
    steps = _decoder_steps(raw)
    table = _byte_level(tokens, steps) or _byte_fallback(tokens, steps) or _local(raw, tokens, steps)
    if table is not None:
        return lambda: PieceDetokenizer(table)
    decode: Callable[[list[str]], str] = raw.decoder.decode
    return lambda: WindowDetokenizer(tokens, decode)


def visible_tokens(raw: Tokenizer) -> dict[int, str]:
    """The vocabulary by id, without special tokens."""
    special = {token.content for token in raw.get_added_tokens_decoder().values() if token.special}
    ids = set(raw.get_vocab(with_added_tokens=True).values()) | set(raw.get_vocab(with_added_tokens=False).values())
    tokens = ((token_id, raw.id_to_token(token_id)) for token_id in sorted(ids))
    return {token_id: token for token_id, token in tokens if token is not None and token not in special}


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies, as GPT-2 chose them.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for U+0100 and what follows.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _decoder_steps(raw: Tokenizer) -> list[_Step]:
    """The decoder's steps in order, nested sequences flattened; empty where there is no decoder."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    if raw.decoder is None:
        return []
    shell = Tokenizer(BPE())  # the decoder's configuration without the vocabulary around it
    shell.decoder = raw.decoder

    def flat(step: _Step) -> list[_Step]:
        if step["type"] != "Sequence":
            return [step]
        return [inner for part in cast("list[_Step]", step["decoders"]) for inner in flat(part)]

    return flat(json.loads(shell.to_str())["decoder"])


def _strip_of(steps: list[_Step]) -> tuple[int, str] | None:
    """(number, character) that the last steps of a decoder cut off the start of the text; None if they do else."""
    match [step["type"] for step in steps]:
        case [] | ["Fuse"]:
            return 0, " "
        case ["Fuse", "Strip"] if steps[1]["stop"] == 0:
            return steps[1]["start"], steps[1]["content"]
        case _:
            return None


def _byte_level(tokens: dict[int, str], steps: list[_Step]) -> PieceTable | None:
    if [step["type"] for step in steps] not in (["ByteLevel"], ["ByteLevel", "Fuse"], ["Fuse", "ByteLevel"]):
        return None
    alphabet = byte_alphabet()

    def as_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:
            return token.encode()  # an added token that is not written in the alphabet

    return PieceTable(byte_pieces((token_id, as_bytes(token)) for token_id, token in tokens.items()))


def _byte_fallback(tokens: dict[int, str], steps: list[_Step]) -> PieceTable | None:
    kinds = [step["type"] for step in steps]
    if "ByteFallback" not in kinds:
        return None
    at = kinds.index("ByteFallback")
    strip = _strip_of(steps[at + 1 :])
    if strip is None or any(step["type"] != "Replace" or "String" not in step["pattern"] for step in steps[:at]):
        return None
    pieces: dict[int, str | bytes] = {}
    for token_id, token in tokens.items():
        text = token
        for step in steps[:at]:
            text = text.replace(step["pattern"]["String"], step["content"])
        byte = _BYTE_TOKEN.fullmatch(text)
        pieces[token_id] = bytes([int(byte[1], 16)]) if byte else text
    return PieceTable(pieces, num_strip=strip[0], strip_char=strip[1])


def _local(raw: Tokenizer, tokens: dict[int, str], steps: list[_Step]) -> PieceTable | None:
    """Decoders that look at one token alone, and at whether it is the first: their own code fills the table."""
    if not steps:
        return PieceTable({token_id: " " + token for token_id, token in tokens.items()}, first=tokens.__getitem__)
    if [step["type"] for step in steps] not in (["Metaspace"], ["WordPiece"]):
        return None
    decode: Callable[[list[str]], str] = raw.decoder.decode
    before = decode(["a"])
    pieces = {token_id: decode(["a", token])[len(before) :] for token_id, token in tokens.items()}
    return PieceTable(pieces, first=lambda token_id: decode([tokens[token_id]]))
