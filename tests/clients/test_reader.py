"""The reader's rules, without a server: what may follow what, and from where it asks."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.clients import (
    ChangedError,
    ConfigError,
    Event,
    ExpiredError,
    Finished,
    GapError,
    JobRef,
    MalformedEntryError,
    ModelRef,
    Queued,
    Reader,
    Released,
    RewoundError,
    Started,
    Tokens,
    Usage,
)
from headrace.clients.entries import encode, format_id, to_map
from headrace.clients.payload import pack

FP, OTHER = "1" * 64, "2" * 64


def started(a: int, *resumed: int, fp: str = FP) -> Started:
    return Started((a, 0), 1, "w", JobRef("k", "1-1"), resumed, 0, fp, ModelRef("m", "f"))


def tokens(a: int, k: int, index: int, count: int = 1, choice: int = 0) -> Tokens:
    return Tokens((a, k), index, (7,) * count, "x" * count, choice)


def finished(a: int, k: int, completion: int | None = None, *, done: bool = True, **more: Any) -> Finished:
    return Finished((a, k), "stop", done=done, usage=None if completion is None else Usage(1, completion), **more)


def feed(reader: Reader, *events: Event) -> list[Event | None]:
    given = []
    for event in events:
        field, payload = encode(to_map(event), "d")
        given.append(reader.feed(format_id(event.id), {field.encode(): payload}))
    return given


def test_a_whole_stream() -> None:
    reader = Reader("a")
    assert (reader.read_from, reader.cursor, reader.seen) == ("0-0", "", False)
    events: list[Event] = [
        Queued((0, 9), FP), started(10, 0), tokens(10, 1, 0), tokens(10, 2, 1, 2), Released((10, 3)),
        started(20, 3), tokens(20, 1, 3), finished(20, 2, 5, index=4, token_ids=(1,)),
    ]  # fmt: skip
    assert feed(reader, *events) == events
    assert reader.done
    assert reader.count() == 5
    assert reader.read_from == "20-2"
    assert feed(reader, tokens(20, 3, 9)) == [None]  # nothing counts after the end


def test_choices_are_counted_apart() -> None:
    reader = Reader("a")
    feed(reader, started(10, 0, 0, 0), tokens(10, 1, 0, 2, choice=2), tokens(10, 2, 0, 1), finished(10, 3, done=False))
    feed(reader, started(20, 1, 0, 2), tokens(20, 1, 0, 1, choice=1), tokens(20, 2, 2, 1, choice=2))
    assert [reader.count(choice) for choice in range(4)] == [1, 1, 3, 0]
    assert not reader.done
    feed(reader, finished(20, 3, choice=1, done=False), finished(20, 4, 5, choice=2))
    assert reader.done


@pytest.mark.parametrize(
    ("before", "event", "kind", "expected", "found"),
    [
        ((started(10),), tokens(10, 1, 1), GapError, 0, 1),
        ((started(10), tokens(10, 1, 0, 3)), tokens(10, 2, 5), GapError, 3, 5),
        ((started(10), tokens(10, 1, 0, 3)), tokens(10, 2, 2), RewoundError, 3, 2),
        ((started(10), tokens(10, 1, 0, 3)), tokens(10, 2, 3, choice=1), GapError, 0, 3),
        ((), started(10, 4), GapError, 0, 4),
        ((started(10), tokens(10, 1, 0, 3)), started(20, 2), RewoundError, 3, 2),
        ((started(10), tokens(10, 1, 0, 3)), started(20), RewoundError, 3, 0),
        ((started(10), tokens(10, 1, 0, 3)), started(20, 4), GapError, 3, 4),
        ((started(10), tokens(10, 1, 0, 3)), started(20, 3, 1), GapError, 0, 1),
        ((started(10), tokens(10, 1, 0, 3)), finished(10, 2, 4), GapError, 3, 4),
        ((started(10), tokens(10, 1, 0, 3)), finished(10, 2, 2), RewoundError, 3, 2),
        ((started(10), tokens(10, 1, 0, 3)), finished(10, 2, 4, index=4, token_ids=(1,)), GapError, 3, 4),
        ((started(10), tokens(10, 1, 0, 3)), finished(10, 2, 3, index=3, token_ids=(1,)), RewoundError, 4, 3),
    ],
)
def test_a_gap_and_a_rewind(
    before: tuple[Event, ...], event: Event, kind: type[Exception], expected: int, found: int
) -> None:
    reader = Reader("a")
    feed(reader, *before)
    stood = reader.cursor
    for _ in range(2):  # it stands where it stood, and would say so again
        with pytest.raises((GapError, RewoundError)) as caught:
            feed(reader, event)
        assert type(caught.value) is kind
        assert (caught.value.expected, caught.value.found) == (expected, found)
        assert reader.cursor == stood


def test_another_request_under_the_same_id() -> None:
    for first in (Queued((0, 9), FP), started(10)):
        reader = Reader("a")
        feed(reader, first)
        for event in (Queued((11, 9), OTHER), started(12, fp=OTHER)):
            with pytest.raises(ChangedError) as caught:
                feed(reader, event)
            assert (caught.value.expected, caught.value.fp) == (FP, OTHER)


@pytest.mark.parametrize("choice", [16, -1, 1 << 40])
def test_a_choice_that_cannot_be(choice: int) -> None:
    reader = Reader("a")
    with pytest.raises(MalformedEntryError):
        feed(reader, tokens(10, 1, 0, choice=choice))


def test_a_last_chunk_without_an_index() -> None:
    with pytest.raises(MalformedEntryError):
        Reader("a").feed(b"10-1", {b"json": b'{"e":"finished","reason":"stop","t":[1]}'})


def test_an_unknown_kind_is_skipped_and_moves_the_cursor() -> None:
    reader = Reader("a")
    assert reader.feed(b"10-5", {b"d": pack({"e": "paused"}, "d")}) is None
    assert reader.read_from == "10-5"


# --- again from a cursor ----------------------------------------------------------------------------------------------


def test_after_a_reconnect_the_last_entry_comes_first_once_more() -> None:
    reader = Reader("a")
    events = (started(10), tokens(10, 1, 0))
    feed(reader, *events)
    reader.reconnected()
    assert reader.read_from == "10-0"
    assert feed(reader, events[-1]) == [None]
    assert reader.read_from == "10-1"
    assert feed(reader, tokens(10, 2, 1)) == [tokens(10, 2, 1)]


def test_a_later_entry_first_is_an_error() -> None:
    reader = Reader("a")
    feed(reader, started(10), tokens(10, 1, 0))
    reader.reconnected()
    for later in (tokens(10, 2, 1), started(30, 1), started(30, 0)):
        with pytest.raises(RewoundError):
            feed(reader, later)


def test_a_reconnect_before_the_first_entry_changes_nothing() -> None:
    reader = Reader("a")
    reader.reconnected()
    assert reader.read_from == "0-0"
    assert feed(reader, started(10)) == [started(10)]


def test_a_kept_cursor_goes_on_as_if_nothing_had_happened() -> None:
    reader = Reader("a")
    last = tokens(10, 2, 0, 4, choice=2)
    feed(reader, Queued((0, 9), FP), started(10), tokens(10, 1, 0, 2), last)
    kept = Reader("a", reader.cursor)
    assert (kept.cursor, kept.fp, kept.seen, kept.done) == (reader.cursor, FP, True, False)
    assert kept.read_from == "10-1"
    assert feed(kept, last) == [None]
    assert [kept.count(choice) for choice in range(3)] == [2, 0, 4]
    with pytest.raises(ChangedError):
        feed(kept, started(11, 2, 0, 4, fp=OTHER))
    feed(kept, finished(10, 3, 6))
    assert kept.done


def test_a_cursor_kept_from_the_end_ends_at_once() -> None:
    reader = Reader("a")
    feed(reader, started(10), finished(10, 1, 0))
    kept = Reader("a", reader.cursor)
    assert feed(kept, finished(10, 1, 0)) == [None]
    assert kept.done


def test_the_entry_before_the_first_of_an_attempt() -> None:
    reader = Reader("a")
    feed(reader, started(10))
    reader.reconnected()
    assert reader.read_from == "9-18446744073709551615"
    queued = Reader("a", f"0-1;{FP};0")
    assert queued.read_from == "0-0"


def test_a_stream_that_is_gone_has_expired_only_if_it_was_there() -> None:
    reader = Reader("a")
    reader.gone()
    feed(reader, started(10))
    with pytest.raises(ExpiredError):
        reader.gone()


@pytest.mark.parametrize(
    "cursor",
    [
        "x",
        "1-1",
        "1-1;;",
        ";;0",
        "0-0;;0",
        "1-1;;-1",
        "1-1;;1.",
        "1-1;zz;0",
        "1-1;;0\n",
        "1-1;;" + "0." * 16 + "0",
        "18446744073709551616-0;;0",
        f"1-1;{FP.replace('1', 'A')};0",
        "1-1;;٣",
    ],
)
def test_a_cursor_that_cannot_be_is_refused(cursor: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Reader("a", cursor)
    assert caught.value.param == "cursor"


def test_an_id_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError):
        Reader("a b")
