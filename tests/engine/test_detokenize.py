"""Ids to text: what comes out is final, whole characters, and the decoded output when joined."""

from __future__ import annotations

import codecs
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.engine.detokenize import PieceDetokenizer, PieceTable, WindowDetokenizer, byte_pieces
from headrace.engine.token_table import byte_alphabet, detokenizer_factory, visible_tokens
from headrace.engine.types import Detokenizer
from tests.support import tokenizer_zoo as zoo

Zoo = Callable[[], Tokenizer]
EXACT: list[Zoo] = [zoo.byte_level, zoo.wordpiece, zoo.metaspace, zoo.plain_words, zoo.word_ends]
ALL: list[Zoo] = [*EXACT, zoo.byte_fallback, zoo.odd_sequence]
FACTORIES = {make: detokenizer_factory(make()) for make in ALL}
FAMILY = "👩‍👩‍👧"

# Any integers, but mostly ids that exist.
ids_lists = st.lists(st.integers(0, 700) | st.integers(0, 20) | st.integers(-(2**70), 2**70), max_size=40)
byte_lists = st.lists(
    st.sampled_from([*FAMILY.encode(), 0x20, 0x41, 0xED, 0xA0, 0xFF, 0xF4, 0xE4]) | st.integers(0, 255)
)


def known(raw: Tokenizer, ids: list[int]) -> list[int]:
    return [i for i in ids if 0 <= i < 2**32 and raw.id_to_token(i) is not None]


def run(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> tuple[list[str], str]:
    """Feed ids cut into calls; give the texts and what flush gave."""
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [detokenizer.push(tuple(ids[a:b])) for a, b in itertools.pairwise(bounds)], detokenizer.flush()


def one_by_one(detokenizer: Detokenizer, ids: list[int]) -> tuple[list[str], str]:
    return run(detokenizer, ids, list(range(1, len(ids))))


def bytes_of_fallback(text: str) -> list[int]:
    raw = zoo.byte_fallback()
    return [token for byte in text.encode() if (token := raw.token_to_id(f"<0x{byte:02X}>")) is not None]


def fallback_oracle(ids: list[int]) -> str:
    """The whole decode where runs of byte tokens are UTF-8 with replacement."""
    raw = zoo.byte_fallback()
    special = {i for i, token in raw.get_added_tokens_decoder().items() if token.special}
    tokens = [raw.id_to_token(i) for i in known(raw, ids) if i not in special]
    text = ""
    for is_byte, group in itertools.groupby(tokens, key=lambda token: token.startswith("<0x")):
        if is_byte:
            text += bytes(int(token[3:5], 16) for token in group).decode(errors="replace")
        else:
            text += "".join(group).replace("▁", " ")
    return text.removeprefix(" ")


@pytest.mark.parametrize("make", ALL)
@settings(max_examples=60, deadline=None)
@given(ids=ids_lists)
@example(ids=[-1, -(2**70), 2**70, 2**32, 2**31, 10**6])
def test_no_id_sequence_raises_and_strangers_add_nothing(make: Zoo, ids: list[int]) -> None:
    texts, rest = one_by_one(FACTORIES[make](), ids)
    assert "".join(texts) + rest == "".join(one_by_one(FACTORIES[make](), known(make(), ids))[0]) + rest


@pytest.mark.parametrize("make", EXACT)
@settings(max_examples=80, deadline=None)
@given(ids=ids_lists, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_the_joined_text_is_the_whole_decode(make: Zoo, ids: list[int], cuts: list[int]) -> None:
    ids = known(make(), ids)
    texts, rest = run(FACTORIES[make](), ids, cuts)
    assert "".join(texts) + rest == make().decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 380) | st.integers(3, 258), max_size=40), cuts=st.lists(st.integers(0, 40)))
def test_byte_fallback_is_incremental_utf8_with_replacement(ids: list[int], cuts: list[int]) -> None:
    texts, rest = run(FACTORIES[zoo.byte_fallback](), ids, cuts)
    assert "".join(texts) + rest == fallback_oracle(ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20))
def test_byte_fallback_equals_the_library_where_runs_are_utf8(text: str) -> None:
    raw = zoo.byte_fallback()
    ids = raw.encode(text, add_special_tokens=False).ids
    texts, rest = one_by_one(FACTORIES[zoo.byte_fallback](), ids)
    assert "".join(texts) + rest == raw.decode(ids, skip_special_tokens=True)
    assert rest == ""


@pytest.mark.parametrize("make", ALL)
@settings(max_examples=60, deadline=None)
@given(ids=ids_lists, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_what_is_out_after_each_token_does_not_depend_on_the_cuts(make: Zoo, ids: list[int], cuts: list[int]) -> None:
    singles, single_rest = one_by_one(FACTORIES[make](), ids)
    texts, rest = run(FACTORIES[make](), ids, cuts)
    assert rest == single_rest
    done = 0
    for end, text in zip([*sorted(min(cut, len(ids)) for cut in cuts), len(ids)], texts, strict=True):
        done += len(text)
        assert "".join(singles[:end])[:done] == "".join(singles[:end])
        assert len("".join(singles[:end])) == done


@settings(max_examples=100, deadline=None)
@given(data=byte_lists)
def test_random_bytes_come_out_as_soon_as_they_are_certain(data: list[int]) -> None:
    """Nothing is held back but the beginning of a character that may still be completed."""
    raw = zoo.byte_level()
    token_of = {byte: raw.token_to_id(char) for char, byte in byte_alphabet().items()}
    oracle = codecs.getincrementaldecoder("utf-8")("replace")
    detokenizer = FACTORIES[zoo.byte_level]()
    for byte in data:
        assert detokenizer.push((token_of[byte],)) == oracle.decode(bytes([byte]))
    assert detokenizer.flush() == oracle.decode(b"", final=True)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    "text", [FAMILY, "안녕하세요", "příliš žluťoučký", "🇰🇷👍🏽", "A 世a b", "a\ufffdb\ufffd", "\u200d\ufeffx"]
)
@pytest.mark.parametrize("make", [zoo.byte_level, zoo.byte_fallback, zoo.odd_sequence])
def test_split_characters_never_show(make: Zoo, text: str) -> None:
    """ED3, ED5, QF7, QF9: one byte a token; no U+FFFD but the output's own; nothing twice; nothing left over."""
    if make is zoo.byte_fallback:
        ids = bytes_of_fallback(text)
    else:
        token_of = {byte: make().token_to_id(char) for char, byte in byte_alphabet().items()}
        ids = [token_of[byte] for byte in text.encode()]
    singles, rest = one_by_one(FACTORIES[make](), ids)
    genuine_at_end = text.endswith("\ufffd") and make is zoo.odd_sequence  # the window cannot tell it from half of one
    assert (rest == "") != genuine_at_end
    assert "".join(singles) + rest == text
    assert all(len(single) <= 2 for single in singles), "each character as soon as its last byte is there"
    assert FACTORIES[make]().push(tuple(ids)) + rest == text, "and the same in one batch"


def test_a_skipped_special_token_does_not_break_a_run_of_bytes() -> None:
    raw = zoo.byte_level()
    token_of = {byte: raw.token_to_id(char) for char, byte in byte_alphabet().items()}
    end = raw.token_to_id("<|im_end|>")
    ids = [token_of[0xEC], end, token_of[0x95], end, 99_999, token_of[0x88], end]
    texts, rest = one_by_one(FACTORIES[zoo.byte_level](), ids)
    assert texts == ["", "", "", "", "", "안", ""]
    assert (rest, raw.decode(ids, skip_special_tokens=True)) == ("", "안")


def test_half_a_character_ends_as_one_replacement() -> None:
    raw = zoo.byte_level()
    token_of = {byte: raw.token_to_id(char) for char, byte in byte_alphabet().items()}
    detokenizer = FACTORIES[zoo.byte_level]()
    assert detokenizer.push(tuple(token_of[byte] for byte in b"ok\xf0\x9f\x91")) == "ok"
    assert detokenizer.flush() == "\ufffd"


def test_only_the_first_leading_blank_is_stripped_however_it_comes() -> None:
    raw = zoo.byte_fallback()
    blank, byte_blank, word = raw.token_to_id("▁"), raw.token_to_id("<0x20>"), raw.token_to_id("▁the")
    special = raw.token_to_id("<s>")
    for ids in ([blank, word], [byte_blank, word], [special, blank, blank], [word, blank], [byte_blank, byte_blank]):
        texts, rest = one_by_one(FACTORIES[zoo.byte_fallback](), ids)
        assert "".join(texts) + rest == raw.decode(ids, skip_special_tokens=True)


def test_each_kind_gets_its_detokenizer() -> None:
    tables = [zoo.byte_level, zoo.byte_fallback, zoo.wordpiece, zoo.metaspace, zoo.plain_words]
    assert all(isinstance(FACTORIES[make](), PieceDetokenizer) for make in tables)
    assert all(isinstance(FACTORIES[make](), WindowDetokenizer) for make in (zoo.word_ends, zoo.odd_sequence))


def test_the_window_lets_go_of_what_never_becomes_good() -> None:
    """A decoder that ends in U+FFFD for ever: after eight tokens the text comes out as it is."""
    window = WindowDetokenizer({0: "?"}, lambda tokens: "\ufffd" * len(tokens))
    assert [window.push((0,)) for _ in range(9)] == [""] * 7 + ["\ufffd" * 8, ""]
    assert window.flush() == "\ufffd"


def test_byte_pieces_of_a_hand_made_vocabulary() -> None:
    table = PieceTable(byte_pieces([(0, b"ab"), (1, b"\xec\x95"), (2, b"\x88"), (3, b"")]))
    assert table.pieces == {0: "ab", 1: b"\xec\x95", 2: b"\x88"}
    detokenizer = PieceDetokenizer(table)
    assert [detokenizer.push((i,)) for i in (0, 1, 3, 2, 1, 0, 2)] == ["ab", "", "", "안", "", "\ufffdab", "\ufffd"]


def test_long_random_streams_of_every_kind() -> None:
    """ED1: ten thousand random ids, no exception, and the joined text is right."""
    rng = random.Random(7)
    for make in ALL:
        ids = [
            rng.randrange(-5, 800) for _ in range(10_000 if make not in (zoo.word_ends, zoo.odd_sequence) else 1_000)
        ]
        texts, rest = one_by_one(FACTORIES[make](), ids)
        if make in EXACT:
            assert "".join(texts) + rest == make().decode(known(make(), ids), skip_special_tokens=True)


def test_visible_tokens_leave_out_special_ones_only() -> None:
    tokens = visible_tokens(zoo.byte_level())
    assert set(zoo.SPECIAL).isdisjoint(tokens.values())
    assert {"<think>", "<tool_call>", "é"} <= set(tokens.values())
