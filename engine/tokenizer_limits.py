"""What a tokenizer may make of a text: it comes with the model, and a model may come from anybody.

The library runs to its end whatever it is asked for, so a tokenizer.json is looked through before: forty steps that
each write a text twice would make a terabyte of one character.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_GROWTH = 1024.0  # times; of real ones a step seldom makes a text longer, and few have more than five
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")  # as a tokenizer.json and the library call them
_DOUBLING = ("ByteLevel", "NFD", "NFC", "NFKD", "NFKC", "Nmt", "Precompiled", "BertNormalizer")  # at most, on average
_STEPS = ("normalizers", "pretokenizers", "processors", "decoders")  # where a sequence of one of the parts has its own


def growth(part: object) -> float:
    """How many times longer a text, or its ids, may become in a part of a tokenizer.json; at least 1."""
    if not isinstance(part, dict):
        return 1.0
    step = cast("Mapping[str, Any]", part)
    inner = next((step[name] for name in _STEPS if isinstance(step.get(name), list)), None)
    if inner is not None:
        return math.prod(map(growth, cast("list[object]", inner)))
    kind = step.get("type")
    if kind == "Replace":
        return _replaced(step.get("pattern"), step.get("content"))
    if kind == "TemplateProcessing" and isinstance(step.get("single"), list):
        pieces = cast("list[object]", step["single"])
        return float(max(1, sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces)))
    return 2.0 if kind in _DOUBLING else 1.0


def _replaced(pattern: object, content: object) -> float:
    """A pattern may match between two characters, where it is no plain text; both are what the file says, or wrong."""
    length = len(content) if isinstance(content, str) else 0
    plain: object = cast("Mapping[str, object]", pattern).get("String") if isinstance(pattern, dict) else None
    return max(1.0, length / len(plain)) if isinstance(plain, str) and plain else 1.0 + length


def excess(raw: Tokenizer) -> str:
    """Name the part of a tokenizer that would make a text too long; empty if there is none."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    shell = Tokenizer(BPE())  # the other parts without the vocabulary, which may be large
    for part in _PARTS:
        if getattr(raw, part) is not None:
            setattr(shell, part, getattr(raw, part))
    values: dict[str, Any] = json.loads(shell.to_str())
    return next((part for part in _PARTS if growth(values.get(part)) > MOST_GROWTH), "")
