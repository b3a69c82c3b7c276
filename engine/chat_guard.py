"""Keeps text of callers from becoming control tokens in a rendered chat, whatever the template does with it.

A control token is matched on its whole text, so it is enough that callers can never supply the first or the last
character of one. Where a caller's text could play a part in a control token, those characters ("edges", such as `<` and
`>`) are replaced by private twins in everything that came from the caller; the template is rendered; and the twins are
turned back by the tokenizer's normalizer, that is after the tokenizer has looked for control tokens in the text and
before it cuts the rest into pieces. So the rest is tokenised exactly as plain text. Twins are single characters: what
templates do with text (trim, split, slice, join) works on them as on the originals.

- Text that lies wholly inside a control token (`end` in `<|end|>`) could be completed by a template that writes
  `'<|' + x + '|>'`. It gets a private character that the normalizer removes. Roles, types and keys that the template
  itself names are what such templates are made for, and are left alone.
- Templates that look for control text in contents (`'</think>' in content`) must find it: in those places of the
  template's source, the literals get the same twins.
- Private characters in the caller's own text are written as two characters, so nothing is lost and nothing is random.

Pure, but for jinja2's lexer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

from .stop_strings import compile_stops, contains_any

STANDARD_ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})
# A text with more edges is disguised without a closer look, which would take long under the interpreter's lock.
MAX_EDGES_READ = 4096

_NAMED_KEYS = frozenset({"role", "type"})  # what stands under them is compared with names, not printed as prose
# Methods and filters whose first argument is looked for in the text
_STRIPS = frozenset({"strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "startswith", "endswith"})
_CUTS = frozenset({"split", "rsplit", "partition", "rpartition", "replace"})
_FINDS = frozenset({"find", "rfind", "index", "rindex", "count"})
_LOOKS_FOR = _STRIPS | _CUTS | _FINDS
_FIRST_TWIN = 0x100000  # private use plane 16
_CODE_OFFSET = 0x8000
_Token = tuple[int, str, str]  # position in the source, kind, raw text


@dataclass(frozen=True, slots=True)
class CallerText:
    """A text from a caller, and what it is used for."""

    text: str
    kind: Literal["prose", "name", "key"] = "prose"  # name: a role, a type, a template variable


class ChatGuard:
    """The disguise for one tokenizer's control tokens and one template. Immutable once made."""

    def __init__(self, control_tokens: Iterable[str], template: str) -> None:
        """`control_tokens`: texts that callers must not be able to write. Raises jinja2's TemplateSyntaxError."""
        tokens = sorted({token.strip() for token in control_tokens} - {""})
        self._template = template
        self._lexed = _lex(template)
        self._inside = "\0".join(tokens)
        self._max_len = max(map(len, tokens), default=0)
        self._heads = {token[:i] for token in tokens for i in range(1, len(token))}
        self._tails = {token[i:] for token in tokens for i in range(1, len(token))}
        self._whole = compile_stops(tuple(tokens), max_chars=sum(map(len, tokens))) if tokens else None
        searched = sorted({re.escape(raw[1:-1]) for _, raw in _searched_literals(self._lexed)} - {""})
        self._removable = re.compile("|".join([r"\s+", *searched]))  # what a template may take out of a text
        edges = self._edges = sorted({token[0] for token in tokens} | {token[-1] for token in tokens})
        names = {raw for _, kind, raw in self._lexed if kind == "name"}
        literals = {raw[1:-1] for _, kind, raw in self._lexed if kind == "string"}
        # Not those that hold control text themselves, for callers would have it by naming them.
        words = {text for text in literals if self._is_word(text)}
        self._own = {"prose": frozenset[str](), "name": STANDARD_ROLES | words, "key": names | words}
        first = _free_base(template, 2 * len(edges) + 2)
        twins = [chr(first + i) for i in range(len(edges))]
        self._blank, self._escape = chr(first + len(edges)), chr(first + len(edges) + 1)
        reserved = [*twins, self._blank, self._escape]
        codes = [self._escape + chr(first + _CODE_OFFSET + i) for i in range(len(reserved))]
        self._twins = str.maketrans(dict(zip(edges, twins, strict=True)))
        self._disguise = self._twins | str.maketrans(dict(zip(reserved, codes, strict=True)))
        # In this order: what one step brings back, no later one changes.
        self.reveal_steps: tuple[tuple[str, str], ...] = (
            *zip(twins, edges, strict=True),
            (self._blank, ""),
            *zip(codes, reserved, strict=True),
        )

    def is_risky(self, item: CallerText) -> bool:
        """Whether a text holds, begins, ends or lies inside the text of a control token. When in doubt, it does."""
        if item.text in self._own[item.kind] or self._whole is None:
            return False
        core = item.text.strip()
        num_edges = sum(map(core.count, self._edges))
        if num_edges > MAX_EDGES_READ or self._is_inside(core):
            return True
        if num_edges == 0:
            return False
        lengths = range(1, min(len(core), self._max_len) + 1)
        return (
            contains_any(self._whole, core)
            or contains_any(self._whole, self._removable.sub("", core))
            or any(core[-n:] in self._heads or core[:n] in self._tails for n in lengths)
        )

    def disguise(self, value: object, is_name: bool = False) -> object:
        """The same JSON-like value with every text disguised. `is_name` as in `caller_texts`."""
        if isinstance(value, str):
            return self._disguise_text(CallerText(value, "name" if is_name else "prose"))
        if isinstance(value, dict):
            items = cast("dict[str, object]", value).items()
            return {
                self._disguise_text(CallerText(key, "key")): self.disguise(item, key in _NAMED_KEYS)
                for key, item in items
            }
        if isinstance(value, list):
            return [self.disguise(item, is_name) for item in cast("list[object]", value)]
        return value

    def disguised_template(self) -> str:
        """The template with twins in the literals that it looks for in texts."""
        out: list[str] = []
        at = 0
        for position, raw in _searched_literals(self._lexed):
            out += [self._template[at:position], raw.translate(self._twins)]
            at = position + len(raw)
        return "".join(out) + self._template[at:]

    def reveal(self, text: str) -> str:
        """Undo the disguise, as the normalizer does."""
        for disguised, original in self.reveal_steps:
            text = text.replace(disguised, original)
        return text

    def _is_word(self, text: str) -> bool:
        has_edge = any(edge in text and not edge.isalnum() for edge in self._edges)
        return not has_edge and not (self._whole is not None and contains_any(self._whole, text))

    def _is_inside(self, core: str) -> bool:
        return 0 < len(core) < self._max_len and core in self._inside

    def _disguise_text(self, item: CallerText) -> str:
        if item.text in self._own[item.kind]:
            return item.text
        text = item.text.translate(self._disguise)
        if not self._is_inside(item.text.strip()):
            return text
        end = len(text.rstrip())
        return text[:end] + self._blank + text[end:]


def caller_texts(value: object, is_name: bool = False) -> Iterator[CallerText]:
    """Every text in a JSON-like value, keys too. `is_name`: a text that is not in a map is a name, not prose."""
    if isinstance(value, str):
        yield CallerText(value, "name" if is_name else "prose")
    elif isinstance(value, dict):
        for key, item in cast("dict[str, object]", value).items():
            yield CallerText(key, "key")
            yield from caller_texts(item, key in _NAMED_KEYS)
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from caller_texts(item, is_name)


def _free_base(template: str, num_chars: int) -> int:
    """The first place in the private plane whose characters the template does not use itself."""
    used = {ord(char) for char in template if ord(char) >= _FIRST_TWIN}
    base = _FIRST_TWIN
    while used & {*range(base, base + num_chars), *range(base + _CODE_OFFSET, base + _CODE_OFFSET + num_chars)}:
        base += num_chars
    return base


def _lex(template: str) -> list[_Token]:
    """The template's tokens with their places. Raises jinja2's TemplateSyntaxError."""
    from jinja2 import Environment

    out: list[_Token] = []
    at = 0
    # The environment only reads the syntax; nothing is rendered with it.
    for _, kind, raw in Environment(trim_blocks=True, lstrip_blocks=True).lex(template):  # noqa: S701
        at = template.index(raw, at)
        if kind != "whitespace":
            out.append((at, kind, raw))
        at += len(raw)
    return out


def _searched_literals(lexed: list[_Token]) -> Iterator[tuple[int, str]]:
    """(position, raw text) of the string literals that are compared with texts or looked for in them."""
    nothing: _Token = (0, "", "")
    padded = [nothing] * 3 + lexed + [nothing] * 2
    for i, (position, kind, raw) in enumerate(padded):
        if kind != "string":
            continue
        (_, _, before3), (_, _, before2), (_, _, before1) = padded[i - 3 : i]
        (_, _, after1), (_, _, after2) = padded[i + 1 : i + 3]
        is_argument = before1 == "(" and before2 in _LOOKS_FOR and before3 in {".", "|"}
        is_compared = before1 in {"==", "!="} or after1 in {"==", "!="}
        if is_argument or is_compared or after1 == "in" or (after1 == "not" and after2 == "in"):
            yield position, raw


_HTML_TAG = re.compile(
    "</?(?:a|b|i|u|s|p|br|hr|em|h[1-6]|li|ol|ul|td|th|tr|sub|sup|div|pre|img|code|span|strong|table|caption|thead"
    "|tbody|tfoot|blockquote)>"
)


def is_control(token: str, special: bool, template: str) -> bool:
    """Whether callers must not be able to write this added token.

    Every special token is; of the others those that the template writes, and those that look like mark-up (a bracket
    or a bar in them), but for plain HTML tags. Runs of blanks and words that were added to a vocabulary stay text.
    """
    if not token.strip(" \t\r\n▁"):
        return False
    if special or token in template:
        return True
    return bool(re.search(r"[<>\[\]{}|｜]", token)) and _HTML_TAG.fullmatch(token) is None
