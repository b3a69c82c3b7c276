"""The write side of one attempt against a stream that does what the append script does."""

from __future__ import annotations

import random

import pytest

from headrace.worker.connection import Failed
from headrace.worker.writer import Append, Writer, WriterState

LOST = Failed("LOST", "connection closed")


class Stream:
    """The server's side: compare and append."""

    def __init__(self, entries: list[tuple[bytes, bytes]] | None = None) -> None:
        self.entries = entries or []
        self.flag = 0

    @property
    def newest(self) -> bytes:
        return self.entries[-1][0] if self.entries else b""

    def append(self, append: Append) -> list[object]:
        if self.newest != append.previous_id:
            return [0, self.newest]
        self.entries.append((append.entry_id, append.payload))
        return [1, self.flag]

    def first_of(self, writer: Writer) -> list[object]:
        first = writer.id_of(0)
        return [(entry_id, [writer.field, payload]) for entry_id, payload in self.entries if entry_id == first]


def make_writer(base_id: bytes = b"", num_entries: int = 3) -> Writer:
    writer = Writer(base_id, 1000, b"d")
    for number in range(num_entries):
        writer.add(b"payload %d" % number, num_tokens=number)
    return writer


def exchange(writer: Writer, stream: Stream, lose: set[int] | None = None, *, at_once: bool = True) -> list[int]:
    """One pipeline; replies of the numbers in `lose`, and all later ones, are lost. What was sent.

    `at_once`: what is to be read back is, now and not before the next one.
    """
    verify(writer, stream)
    due = writer.due()
    outcomes = [stream.append(append) for append in due]
    is_lost = False
    for append, outcome in zip(due, outcomes, strict=True):
        is_lost = is_lost or append.seq in (lose or set())
        writer.reply(append.seq, LOST if is_lost else outcome)
    if is_lost:
        writer.reconnected()
    if at_once:
        verify(writer, stream)
    return [append.seq for append in due]


def verify(writer: Writer, stream: Stream) -> None:
    """Read back what is to be read back."""
    if writer.must_verify:
        writer.verified(stream.first_of(writer))


def test_nothing_follows_started_before_its_reply() -> None:
    writer, stream = make_writer(), Stream()
    assert exchange(writer, stream) == [0]
    assert exchange(writer, stream) == [1, 2]
    assert [entry_id for entry_id, _ in stream.entries] == [b"1000-0", b"1000-1", b"1000-2"]


def test_each_entry_names_its_predecessor_and_the_first_the_base() -> None:
    writer = make_writer(b"900-4")
    [first] = writer.due()
    assert (first.previous_id, first.entry_id) == (b"900-4", b"1000-0")
    writer.reply(0, [1, 0])
    assert [(each.previous_id, each.entry_id) for each in writer.due()] == [
        (b"1000-0", b"1000-1"),
        (b"1000-1", b"1000-2"),
    ]


def test_several_may_be_in_flight_and_more_may_follow() -> None:
    writer = make_writer()
    writer.due()
    writer.reply(0, [1, 0])
    assert [each.seq for each in writer.due()] == [1, 2]
    writer.add(b"payload 3")
    assert [each.seq for each in writer.due()] == [3]
    for seq in (1, 2, 3):
        writer.reply(seq, [1, 0])
    assert writer.confirmed == 4


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_reply_is_found_in_by_sending_the_same_again(lost: int) -> None:
    writer, stream = make_writer(), Stream()
    writer.ended = True
    if lost:
        exchange(writer, stream)
    exchange(writer, stream, lose={lost})
    for _ in range(4):
        exchange(writer, stream)
    assert writer.complete
    assert [payload for _, payload in stream.entries] == [b"payload 0", b"payload 1", b"payload 2"]


def test_a_started_refused_by_a_strangers_entry_of_the_same_id_is_fenced() -> None:
    writer, stream = make_writer(), Stream([(b"1000-0", b"another's started")])
    exchange(writer, stream)
    assert writer.state is WriterState.FENCED
    assert writer.due() == []


def test_the_tail_that_a_failover_lost_is_written_again() -> None:
    writer, stream = make_writer(), Stream()
    exchange(writer, stream)
    exchange(writer, stream)
    before = list(stream.entries)
    del stream.entries[1:]
    writer.reconnected()
    assert writer.probing
    for _ in range(3):
        exchange(writer, stream)
    assert stream.entries == before
    assert not writer.probing


def test_a_probe_that_finds_the_last_entry_writes_nothing() -> None:
    writer, stream = make_writer(), Stream()
    exchange(writer, stream)
    exchange(writer, stream)
    before = list(stream.entries)
    writer.reconnected()
    assert exchange(writer, stream) == [2]
    assert (stream.entries, writer.probing, writer.confirmed) == (before, False, 3)


@pytest.mark.parametrize("base", [b"", b"900-4"])
def test_an_attempt_that_a_failover_lost_whole_is_written_again_from_started(base: bytes) -> None:
    stream = Stream([(base, b"before")] if base else [])
    writer = make_writer(base)
    exchange(writer, stream)
    exchange(writer, stream)
    before = list(stream.entries)
    del stream.entries[1 if base else 0 :]
    writer.reconnected()
    for _ in range(3):
        exchange(writer, stream)
    assert stream.entries == before


def test_what_a_server_claimed_before_a_failover_does_not_count_after_it() -> None:
    """The reply to the end is lost; the server says that it is in, and goes before `started` was read back.

    Its replica has `started`, too, but not the end: the request was acknowledged and never ended.
    """
    writer, stream = make_writer(), Stream()
    writer.ended = True
    exchange(writer, stream)
    exchange(writer, stream, lose={2})
    [probe] = writer.due()
    writer.reply(probe.seq, stream.append(probe))
    assert writer.must_verify
    del stream.entries[1:]
    writer.reconnected()
    for _ in range(4):
        assert writer.is_settled <= (len(stream.entries) == 3)
        exchange(writer, stream)
    assert writer.is_settled
    assert [payload for _, payload in stream.entries] == [b"payload 0", b"payload 1", b"payload 2"]


def test_what_a_stranger_with_the_same_ids_wrote_after_a_failover_is_not_gone_on_with() -> None:
    """The failover has lost this attempt whole, and another that began in the same millisecond has ended meanwhile."""
    writer, stream = make_writer(num_entries=5), Stream()
    exchange(writer, stream)
    stream.entries = [(b"1000-0", b"another's started"), (b"1000-1", b"another's end")]
    before = list(stream.entries)
    writer.reconnected()
    for _ in range(3):
        exchange(writer, stream)
    assert stream.entries == before
    assert writer.state is WriterState.FENCED


def test_a_stream_that_was_there_and_is_gone_ends_the_attempt() -> None:
    stream = Stream([(b"900-4", b"before")])
    writer = make_writer(b"900-4")
    exchange(writer, stream)
    stream.entries.clear()
    exchange(writer, stream)
    assert writer.state is WriterState.GONE
    assert stream.entries == []


def test_another_attempt_fences_at_once() -> None:
    writer, stream = make_writer(), Stream()
    exchange(writer, stream)
    stream.entries.append((b"2000-0", b"another's started"))
    exchange(writer, stream)
    writer.add(b"late")
    assert writer.state is WriterState.FENCED
    assert writer.due() == []
    assert len(stream.entries) == 2


@pytest.mark.parametrize("code", ["OOM", "READONLY", "LOADING", "MISCONF", "TRYAGAIN", "NOSCRIPT", "LOST"])
def test_errors_that_pass_send_the_same_bytes_again(code: str) -> None:
    writer, stream = make_writer(), Stream()
    exchange(writer, stream)
    first = writer.due()
    for append in first:
        writer.reply(append.seq, Failed(code, ""))
    again = writer.due()
    assert [each._replace(again=False) for each in again] == first
    assert all(each.again for each in again)
    assert not any(each.again for each in first)


def test_an_error_that_does_not_pass_breaks_the_attempt() -> None:
    writer = make_writer()
    writer.due()
    writer.reply(0, Failed("WRONGTYPE", "no stream"))
    assert writer.state is WriterState.BROKEN
    assert "WRONGTYPE" in writer.error


def test_an_entry_refused_because_its_predecessor_failed_goes_out_behind_it() -> None:
    """In one pipeline the server runs out of memory for one entry and not for the next: the chain must not tear."""
    writer, stream = make_writer(), Stream()
    exchange(writer, stream)
    one, two = writer.due()
    writer.reply(one.seq, Failed("OOM", ""))
    writer.reply(two.seq, stream.append(two))  # refused: its predecessor is not there
    writer.verified(stream.first_of(writer))
    for _ in range(3):
        exchange(writer, stream)
    assert [payload for _, payload in stream.entries] == [b"payload 0", b"payload 1", b"payload 2"]


def test_replies_tell_whether_the_request_is_cancelled() -> None:
    writer, stream = make_writer(), Stream()
    stream.flag = 1
    exchange(writer, stream)
    assert writer.cancelled


def test_a_token_counts_as_settled_only_when_its_entry_is_in() -> None:
    writer, stream = make_writer(), Stream()
    exchange(writer, stream)
    assert not writer.has_settled
    exchange(writer, stream)
    assert writer.has_settled


@pytest.mark.parametrize("seed", range(200))
def test_random_losses_and_failovers_never_double_tear_or_reorder(seed: int) -> None:
    """Replies are lost at random, and now and then the stream's end, as in a failover to a lagging replica."""
    rng = random.Random(seed)
    base = rng.choice([b"", b"900-4"])
    stream = Stream([(base, b"before")] if base else [])
    num_base = len(stream.entries)
    writer = make_writer(base, num_entries=1)
    for number in range(1, 12):
        writer.add(b"payload %d" % number)
        lose = {rng.randrange(number + 1)} if rng.random() < 0.4 else None
        exchange(writer, stream, lose, at_once=rng.random() < 0.5)
        if rng.random() < 0.15:
            del stream.entries[rng.randint(num_base, len(stream.entries)) :]
            writer.reconnected()
        verify(writer, stream)
        payloads = [payload for _, payload in stream.entries[num_base:]]
        assert payloads == [b"payload %d" % index for index in range(len(payloads))]
        assert writer.in_doubt or writer.confirmed <= len(payloads)
    writer.ended = True
    for _ in range(6):
        exchange(writer, stream)
    assert writer.complete
    assert not writer.probing
    assert len(stream.entries) == num_base + 12
