"""Ids to text, a token at a time.

Whatever comes out is whole characters (code points) and final: it is never taken back, and the joined texts are the
decoded output, byte for byte. State is a function of the ids alone, never of how they were cut into calls.

Decisions:

- Special tokens and ids outside the vocabulary (negative ones too) add nothing, as in the `tokenizers` library: a run
  of bytes goes on across them. No id sequence raises.
- Bytes that are no UTF-8 become one U+FFFD per maximal broken part, as soon as that is certain. A U+FFFD that the
  output really holds stays.
- Only half a character is held back, at most three bytes. Sequences of whole characters that are drawn as one (an
  emoji with joiners) are not kept together: that would hold back text that is final.
- Spaces are not cleaned up, unless the tokenizer's own decoder does it token by token (WordPiece).

Which tokenizer gets which detokenizer is decided in `token_table`. Nothing but the standard library is imported here.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

REPLACEMENT = "\ufffd"
# WindowDetokenizer: tokens of context, and how many tokens may wait for a text that ends well
NUM_CONTEXT_TOKENS = 8
MAX_HELD_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PieceTable:
    """What each id adds to the text. Made once per tokenizer, shared by all its detokenizers.

    A `str` piece is whole characters and ends a run of bytes before it, also where it is empty; a `bytes` piece is part
    of a run that is decoded as UTF-8. An id that is not in `pieces` adds nothing and ends nothing.
    """

    pieces: Mapping[int, str | bytes]
    first: Callable[[int], str] | None = None  # piece of an id in `pieces` at the very start, where that differs
    num_strip: int = 0  # at most so many `strip_char` are cut off the start of the whole text
    strip_char: str = " "


def byte_pieces(tokens: Iterable[tuple[int, bytes]]) -> dict[int, str | bytes]:
    """The pieces of a byte-level vocabulary: (id, bytes) pairs. Whole characters are decoded here, once."""
    pieces: dict[int, str | bytes] = {}
    for token_id, data in tokens:
        if not data:
            continue  # adds nothing, and must not end a run of bytes
        try:
            pieces[token_id] = data.decode()
        except UnicodeDecodeError:
            pieces[token_id] = data
    return pieces


class PieceDetokenizer:
    """Detokenizer of one choice for tokenizers whose tokens each have a text or bytes of their own: nearly all."""

    __slots__ = ("_first", "_get", "_half", "_num_strip", "_strip_char", "_utf8")

    def __init__(self, table: PieceTable) -> None:
        self._get = table.pieces.get
        self._first = table.first  # None once the first piece is out
        self._num_strip = table.num_strip
        self._strip_char = table.strip_char
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._half = False  # the decoder holds the beginning of a character

    def push(self, token_ids: Sequence[int]) -> str:
        """Take further ids; give the text that is now final. About a tenth of a microsecond for most tokens."""
        if len(token_ids) == 1 and not self._half and self._first is None and not self._num_strip:
            piece = self._get(token_ids[0])  # nearly always: one token of whole characters in the middle of a text
            if piece is None:
                return ""
            if type(piece) is str:
                return piece
        out: list[str] = []
        for token_id in token_ids:
            piece = self._get(token_id)
            if piece is None:
                continue
            if self._first is not None:
                piece = self._first(token_id)
                self._first = None
            if isinstance(piece, str):
                if self._half:
                    out.append(self._utf8.decode(b"", final=True))
                    self._half = False
                out.append(piece)
            else:
                out.append(self._utf8.decode(piece))
                self._half = bool(self._utf8.getstate()[0])
        text = "".join(out)
        return self._strip(text) if self._num_strip and text else text

    def flush(self) -> str:
        """The end: half a character comes out as U+FFFD."""
        if not self._half:
            return ""
        self._half = False
        self._num_strip = 0
        return self._utf8.decode(b"", final=True)

    def _strip(self, text: str) -> str:
        while self._num_strip and text.startswith(self._strip_char):
            text = text[1:]
            self._num_strip -= 1
        if text:
            self._num_strip = 0
        return text


class WindowDetokenizer:
    """Detokenizer of one choice for any other decoder: decodes a window of tokens with and without the newest.

    Correct where what tokens add depends on at most `NUM_CONTEXT_TOKENS` before them. A text that ends in U+FFFD, or
    takes back what the context gave, waits for more tokens; after `MAX_HELD_TOKENS` it is given out as it is.
    Costs two calls of `decode` a token.
    """

    def __init__(self, tokens: Mapping[int, str], decode: Callable[[list[str]], str]) -> None:
        """`tokens`: the text of each token that is not skipped; `decode`: the tokenizer's own decoder."""
        self._tokens = tokens
        self._decode = decode
        self._context: list[str] = []
        self._held: list[str] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """Take further ids; give the text that is now final."""
        return "".join(self._push_one(token) for token in map(self._tokens.get, token_ids) if token is not None)

    def flush(self) -> str:
        """The end: give what was held back."""
        if not self._held:
            return ""
        before, after = self._decode(self._context), self._decode(self._context + self._held)
        return self._give(before, after)

    def _push_one(self, token: str) -> str:
        self._held.append(token)
        before, after = self._decode(self._context), self._decode(self._context + self._held)
        settled = after.startswith(before) and not after.endswith(REPLACEMENT)
        return self._give(before, after) if settled or len(self._held) >= MAX_HELD_TOKENS else ""

    def _give(self, before: str, after: str) -> str:
        self._context = (self._context + self._held)[-NUM_CONTEXT_TOKENS:]
        self._held = []
        return after[_common_length(before, after) :]


def _common_length(a: str, b: str) -> int:
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
