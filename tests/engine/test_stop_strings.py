"""Stop strings: the match that completes first, exactly what is held back, independent of the cuts, linear."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.engine.stop_strings import MAX_STOP_CHARS, StopMatcher, compile_stops, contains_any

# Few letters make overlaps likely; the stop strings are seldom and short enough to meet.
stop_lists = st.lists(st.text(alphabet="ab안", min_size=1, max_size=7), min_size=1, max_size=4).map(tuple)


@st.composite
def texts_and_stops(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    """A text made of pieces of the stop strings, so that one begins while another is under way."""
    stops = draw(stop_lists)
    pieces = [stop[i:j] for stop in stops for i in range(len(stop)) for j in range(i + 1, len(stop) + 1)]
    return "".join(draw(st.lists(st.sampled_from(["a", "b", *pieces]), max_size=10))), stops


def first_match(text: str, stops: tuple[str, ...], counted: list[bool] | None = None) -> tuple[int, str] | None:
    """(end, stop) by definition: the first end, at it the longest; `counted[i]`: a match may end at character i."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and (counted is None or counted[end - 1]):
            return end, max(found, key=len)
    return None


def may_grow(text: str, stops: tuple[str, ...]) -> int:
    """The longest end of the text that is the beginning, but not the whole, of a stop string."""
    heads = {stop[:n] for stop in stops for n in range(1, len(stop))}
    return max((n for n in range(1, len(text) + 1) if text[-n:] in heads), default=0)


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def run(matcher: StopMatcher, chunks: list[str]) -> tuple[str, str | None]:
    out, found = "", None
    for chunk in chunks:
        final, stop = matcher.push(chunk)
        out += final
        found = found or stop
    return out + matcher.flush(), found


@settings(max_examples=150, deadline=None)
@given(case=texts_and_stops(), cuts=st.lists(st.integers(0, 40), max_size=8), include=st.booleans())
@example(case=("aabaaabaaac", ("aabaaac",)), cuts=[3, 8], include=False)
@example(case=("xab", ("xabq", "abz", "b")), cuts=[], include=False)
def test_any_cut_gives_what_the_definition_gives(
    case: tuple[str, tuple[str, ...]], cuts: list[int], include: bool
) -> None:
    text, stops = case
    out, found = run(StopMatcher(stops, include), cut(text, cuts))
    match = first_match(text, stops)
    if match is None:
        assert (out, found) == (text, None)
    else:
        end, stop = match
        assert (out, found) == (text[:end] if include else text[: end - len(stop)], stop)


@settings(max_examples=150, deadline=None)
@given(case=texts_and_stops(), cuts=st.lists(st.integers(0, 40), max_size=8))
@example(case=("aabaaabb", ("aabaaac",)), cuts=[6, 7])
def test_held_back_is_exactly_what_may_still_grow(case: tuple[str, tuple[str, ...]], cuts: list[int]) -> None:
    """ED7, ED11: nothing of a stop string is shown, and no more than that is kept."""
    text, stops = case
    matcher = StopMatcher(stops)
    seen = out = ""
    for chunk in cut(text, cuts):
        seen += chunk
        final, stop = matcher.push(chunk)
        out += final
        if stop is not None:
            break
        assert out == seen[: len(seen) - may_grow(seen, stops)]


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.tuples(st.text(alphabet="ab", max_size=5), st.booleans()), max_size=8), stops=stop_lists)
def test_matches_that_do_not_count_are_passed_over(pieces: list[tuple[str, bool]], stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops, include_stop=True)
    text = "".join(piece for piece, _ in pieces)
    counted = [counts for piece, counts in pieces for _ in piece]
    out, found = "", None
    for piece, counts in pieces:
        final, stop = matcher.push(piece, counts=counts)
        out += final
        found = found or stop
    match = first_match(text, stops, counted)
    assert (out + matcher.flush(), found) == ((text, None) if match is None else (text[: match[0]], match[1]))


def test_a_stop_string_in_the_middle_of_a_token_matches() -> None:
    """ED9: not only at the end of the text."""
    assert StopMatcher(("STOP",)).push("now STOP, he said") == ("now ", "STOP")
    assert StopMatcher(("STOP",), include_stop=True).push("now STOP, he said") == ("now STOP", "STOP")


def test_the_one_that_completes_first_wins_and_of_two_the_longer() -> None:
    assert StopMatcher(("bcd", "c")).push("abcd") == ("ab", "c")
    assert StopMatcher(("c", "abc", "bc")).push("xabcx") == ("x", "abc")
    assert StopMatcher(("abcde", "cd")).push("abcde") == ("ab", "cd")


def test_nothing_of_a_stop_string_is_shown_while_it_may_come() -> None:
    """ED7."""
    matcher = StopMatcher(("DEFGHIJ",))
    assert [matcher.push(text) for text in ("alphabet: ABC", "D", "EFGHI", "J", "K")] == [
        ("alphabet: ABC", None),
        ("", None),
        ("", None),
        ("", "DEFGHIJ"),
        ("", None),
    ]


def test_a_marker_passes_whole_when_no_stop_string_begins_in_it() -> None:
    """ED11: a hold-back of a fixed length would cut the marker in two."""
    matcher = StopMatcher(("b,c",))
    assert [matcher.push(text)[0] for text in ("thinking", "</think>", "\n")] == ["thinking", "</think>", "\n"]


def test_what_turns_out_harmless_comes_out_at_once() -> None:
    matcher = StopMatcher(("aab",))
    assert [matcher.push(text)[0] for text in ("xa", "a", "a", "c")] == ["x", "", "a", "aac"]


def test_after_a_match_nothing_comes_out() -> None:
    matcher = StopMatcher(("x",))
    assert matcher.push("axb") == ("a", "x")
    assert (matcher.push("cx"), matcher.flush(), matcher.stop) == (("", None), "", "x")


def test_without_stop_strings_every_text_passes() -> None:
    matcher = StopMatcher(())
    text = "some text"
    assert matcher.push(text)[0] is text
    assert (matcher.active, matcher.flush()) == (False, "")


def test_an_empty_text_after_a_passed_over_match_is_no_match() -> None:
    matcher = StopMatcher(("ab",))
    assert matcher.push("ab", counts=False) == ("ab", None)
    assert matcher.push("") == ("", None)


def test_a_fresh_matcher_knows_nothing_of_the_other_text() -> None:
    first = StopMatcher(("ab",), include_stop=True)
    assert first.push("a") == ("", None)
    other = first.fresh()
    assert other.push("b") == ("b", None)
    assert first.push("b") == ("ab", "ab")
    assert other.push("ab") == ("ab", "ab")


def test_empty_and_oversized_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""))
    with pytest.raises(ValueError, match="more than"):
        StopMatcher(("a" * MAX_STOP_CHARS, "b"))
    assert StopMatcher(("a" * MAX_STOP_CHARS,)).active


def test_characters_that_mean_something_in_patterns_are_plain() -> None:
    for stop in ("]", "^", "-", "\\", "[a", ".*", "$", "\n\n"):
        assert StopMatcher((stop,)).push(f"x{stop}y") == ("x", stop)
        assert StopMatcher((stop,)).push("xqy") == ("xqy", None)


@settings(max_examples=100, deadline=None)
@given(case=texts_and_stops())
def test_contains_any(case: tuple[str, tuple[str, ...]]) -> None:
    text, stops = case
    assert contains_any(compile_stops(stops), text) == any(stop in text for stop in stops)


def test_time_is_linear_in_the_worst_case() -> None:
    """A stop string that nearly matches everywhere: looking again at what is held would take minutes here."""
    matcher = StopMatcher(("a" * 20_000 + "b",))
    begun_s = time.process_time()
    out = sum(len(matcher.push("aaaa")[0]) for _ in range(50_000))
    assert out == 180_000
    assert matcher.push("b") == ("", "a" * 20_000 + "b")
    assert time.process_time() - begun_s < 5
