"""Generates the demo model's training text: our own words, seeded, in English and Korean.

Run as `python -m assets.make_corpus`. The output has one JSON document per line: `{"text": ...}` for raw text and
`{"messages": [...]}` for a chat.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from assets.corpus import chats, questions, stories
from assets.corpus.choose import Chooser

DEFAULT_OUT = Path(__file__).parent / "build" / "corpus.jsonl"
DEFAULT_DOCUMENTS = 60_000
DEFAULT_SEED = 20

Document = dict[str, str] | dict[str, list[chats.Message]]


def raw_story(choose: Chooser, korean: bool) -> Document:
    """A story that begins without any prompt."""
    lexicon = stories.KOREAN if korean else stories.ENGLISH
    return {"text": stories.finished(lexicon, stories.random_wish(lexicon, choose), choose)}


def long_story(choose: Chooser, korean: bool) -> Document:
    """A story of several episodes, so that long outputs stay coherent."""
    lexicon = stories.KOREAN if korean else stories.ENGLISH
    episodes = choose.rng.randint(3, 6)
    if choose.chance(0.5):
        return {"messages": chats.story(choose, korean, episodes)}
    return {"text": stories.finished(lexicon, stories.random_wish(lexicon, choose), choose, episodes)}


def raw_facts(choose: Chooser, korean: bool) -> Document:
    """Plain statements: one, or a few in a row."""
    count = choose.rng.choices([1, 2, 4], [6, 2, 1])[0]
    separator = choose.pick([" ", "\n"])
    return {"text": separator.join(questions.item(choose, korean).plain for _ in range(count))}


def raw_questions(choose: Chooser, korean: bool) -> Document:
    """Questions and answers as marked lines."""
    items = [questions.item(choose, korean) for _ in range(choose.rng.choices([1, 2, 5], [4, 2, 1])[0])]
    asks, answers = ("질문", "답") if korean else choose.pick([("Q", "A"), ("Question", "Answer")])
    return {"text": "\n".join(f"{asks}: {item.question}\n{answers}: {item.answer}" for item in items)}


def chat(choose: Chooser, korean: bool) -> Document:
    """A chat."""
    return {"messages": chats.chat(choose, korean)}


Maker = Callable[[Chooser, bool], Document]

# How often each kind of document comes; a story is some ten times longer than a fact.
MIX: tuple[tuple[Maker, float], ...] = (
    (raw_story, 14.0), (long_story, 1.2), (raw_facts, 30.0), (raw_questions, 10.0), (chat, 45.0),
)  # fmt: skip
KOREAN_SHARE = 0.47


def documents(count: int, seed: int) -> Iterator[Document]:
    """The corpus, one document after the other."""
    rng = random.Random(seed)
    choose = Chooser(rng)
    makers = [maker for maker, _ in MIX]
    weights = [weight for _, weight in MIX]
    for _ in range(count):
        maker = rng.choices(makers, weights)[0]
        yield maker(choose, rng.random() < KOREAN_SHARE)


def main() -> None:
    """Writes the corpus to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--documents", type=int, default=DEFAULT_DOCUMENTS)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as file:
        for document in documents(options.documents, options.seed):
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
    print(f"{options.documents} documents, {options.out.stat().st_size / 1e6:.1f} MB: {options.out}")


if __name__ == "__main__":
    main()
