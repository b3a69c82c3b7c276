"""One choice's text: ids in, text out, and going on where another attempt stopped."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.choice_text import ChoiceText, TextChunk
from headrace.engine.detokenize import PieceDetokenizer, PieceTable, byte_pieces
from headrace.engine.stop_strings import StopMatcher
from headrace.engine.token_table import detokenizer_factory
from tests.support import tokenizer_zoo as zoo

# id = byte; from 256 on a few longer tokens; 300 is a special one
WORDS = {
    256: b"STOP,",
    257: b"</think>",
    258: "안".encode(),
    259: b"ab",
    260: "녕".encode()[:2],
    261: b"b,",
    262: b"ab\xec",
}
BYTES = PieceTable(byte_pieces([(i, bytes([i])) for i in range(256)] + list(WORDS.items())))
FACTORIES = [detokenizer_factory(make()) for make in (zoo.byte_level, zoo.byte_fallback, zoo.word_ends)]

ids_lists = st.lists(
    st.sampled_from([*b"abST", *"안".encode(), *"녕".encode(), *WORDS, 0xFF, 300]) | st.integers(-2, 310), max_size=24
)
stop_lists = st.sampled_from(
    [(), ("ab",), ("b안",), ("ba", "abb"), ("TO", "b,c"), ("\ufffd",), ("안녕", "a안"), ("aaaa",)]
)


def choice(stops: tuple[str, ...] = (), include: bool = False, min_tokens: int = 0) -> ChoiceText:
    return ChoiceText(PieceDetokenizer(BYTES), StopMatcher(stops, include), min_tokens)


def whole(ids: list[int], stops: tuple[str, ...], include: bool, min_tokens: int) -> tuple[str, str | None, int | None]:
    """By definition: the text that each token makes final, cut at the first stop string that counts."""
    detokenizer = PieceDetokenizer(BYTES)
    text = ""
    for number, token_id in enumerate(ids, start=1):
        for char in detokenizer.push((token_id,)):
            text += char
            found = [stop for stop in stops if text.endswith(stop)]
            if found and number > min_tokens:
                stop = max(found, key=len)
                return (text if include else text[: -len(stop)]), stop, number
    return text + detokenizer.flush(), None, None


@settings(max_examples=150, deadline=None)
@given(
    ids=ids_lists,
    stops=stop_lists,
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
    cuts=st.lists(st.integers(0, 24), max_size=5),
)
def test_any_cut_gives_what_the_definition_gives(
    ids: list[int], stops: tuple[str, ...], include: bool, min_tokens: int, cuts: list[int]
) -> None:
    text = choice(stops, include, min_tokens)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    chunks = [text.feed(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    stop = next((chunk.stop for chunk in chunks if chunk.stop is not None), None)
    index = next((chunk.stop_index for chunk in chunks if chunk.stop is not None), None)
    joined = "".join(chunk.text for chunk in chunks) + text.end()
    assert (joined, stop, index) == whole(ids, stops, include, min_tokens)


@settings(max_examples=150, deadline=None)
@given(ids=ids_lists, stops=stop_lists, include=st.booleans(), min_tokens=st.integers(0, 8))
def test_replay_goes_on_as_if_nothing_had_happened(
    ids: list[int], stops: tuple[str, ...], include: bool, min_tokens: int
) -> None:
    """At every cut: in the middle of a character, of a stop string, after a stop string."""
    first = choice(stops, include, min_tokens)
    published, stop_so_far = "", None
    for at in range(len(ids) + 1):
        if at:
            chunk = first.feed([ids[at - 1]])
            published += chunk.text
            stop_so_far = stop_so_far or chunk.stop
        second = choice(stops, include, min_tokens)
        replayed = second.replay(tuple(ids[:at]))
        assert (replayed.text, replayed.stop) == (published, stop_so_far)
        chunk = second.feed(ids[at:])
        joined = published + chunk.text + second.end()
        stop = replayed.stop or chunk.stop
        index = replayed.stop_index or chunk.stop_index
        assert (joined, stop, index) == whole(ids, stops, include, min_tokens)


@pytest.mark.parametrize("factory", FACTORIES)
@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 12) | st.integers(0, 620), max_size=24),
    stops=st.sampled_from([(), (" ",), ("th", "e")]),
)
def test_replay_with_real_tokenizers(factory: object, ids: list[int], stops: tuple[str, ...]) -> None:
    assert callable(factory)
    unbroken = ChoiceText(factory(), StopMatcher(stops))
    expected = unbroken.feed(ids).text + unbroken.end()
    for at in range(len(ids) + 1):
        second = ChoiceText(factory(), StopMatcher(stops))
        assert second.replay(ids[:at]).text + second.feed(ids[at:]).text + second.end() == expected


def test_a_stop_string_ends_the_choice_at_its_token() -> None:
    """ED9; tokens sampled beyond it are told apart by stop_index."""
    text = choice(("TOP",))
    assert text.feed([97, 256, 98, 98]) == TextChunk("aS", "TOP", 2)
    assert (text.num_tokens, text.feed([97]), text.end()) == (2, TextChunk(""), "")
    assert choice(("TOP",), include=True).feed([256]) == TextChunk("STOP", "TOP", 1)
    text = choice(("ab",))
    assert text.feed([262]) == TextChunk("", "ab", 1)
    assert text.end() == "", "half a character after the stop string is dropped with the rest"


def test_stop_index_counts_replayed_tokens() -> None:
    text = choice(("ab",))
    replayed = text.replay([98, 97])
    assert (replayed.text, replayed.num_tokens, replayed.stop) == ("b", 2, None)
    assert text.feed([98]) == TextChunk("", "ab", 3)


def test_settled_ids_that_end_the_choice_say_so() -> None:
    replayed = choice(("ab",)).replay([98, 97, 98])
    assert (replayed.text, replayed.stop, replayed.stop_index) == ("b", "ab", 3)


def test_min_tokens_passes_over_what_ends_too_early() -> None:
    text = choice(("ab",), min_tokens=2)
    assert text.feed([97, 98]) == TextChunk("ab")
    assert text.feed([97, 98]) == TextChunk("", "ab", 4)
    assert choice(("ab",), min_tokens=1).feed([97, 98]) == TextChunk("", "ab", 2), "it ends in token 2 > 1"
    assert choice(("aa",), min_tokens=2).feed([97, 97, 97]) == TextChunk("a", "aa", 3), "overlaps the passed one"


def test_markers_come_whole_and_stop_strings_do_not_show() -> None:
    """ED7, ED11: `b,` may become `b,c`; the marker after it may not, and is not cut."""
    text = choice(("b,c",))
    assert [text.feed([i]).text for i in (97, 261, 257)] == ["a", "", "b,</think>"]


def test_what_is_held_at_the_end_comes_out_in_order() -> None:
    text = choice(("abc",))
    assert text.feed([259, *"안".encode()[:2]]).text == ""
    assert text.end() == "ab\ufffd"


def test_half_a_character_at_the_end_completes_no_stop_string() -> None:
    text = choice(("\ufffd",))
    assert text.feed([0xEC]) == TextChunk("")
    assert text.end() == "\ufffd"
    assert choice(("\ufffd",)).feed([0xEC, 97]) == TextChunk("", "\ufffd", 2)
