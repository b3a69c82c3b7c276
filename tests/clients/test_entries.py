"""Entries of a request's stream, byte for byte, and back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.clients import (
    ErrorInfo,
    Event,
    Finished,
    JobRef,
    MalformedEntryError,
    ModelRef,
    Queued,
    Released,
    Started,
    Timing,
    Tokens,
    Usage,
    entries,
)
from headrace.clients._tokens import decode_tokens
from headrace.clients.entries import decode, encode, format_id, parse_id, to_map, tokens_map
from headrace.clients.payload import pack

FP = "ab" * 32
EVENTS: list[tuple[Event, dict[str, Any]]] = [
    (Queued((0, 17), FP), {"e": "queued", "fp": FP}),
    (
        Started((17, 0), 2, "w", JobRef("p:{q}:jobs", "5-1"), (3, 0), 9, FP, ModelRef("m", "ff"), {"a": 1}),
        {"e": "started", "attempt": 2, "worker": "w", "job": "p:{q}:jobs 5-1", "resumed": [3, 0], "seed": 9, "fp": FP}
        | {"model": {"name": "m", "fingerprint": "ff"}, "metadata": {"a": 1}},
    ),
    (Tokens((17, 1), 3, (5,), "é"), {"e": "tokens", "i": 3, "t": [5], "x": "é"}),
    (Tokens((17, 1), 3, (5,)), {"e": "tokens", "i": 3, "t": [5]}),
    (
        Tokens((17, 2), 0, (5, 6), "x", 2, (((5, -0.5), (7, -1.0)), ((6, 0.0),)), (None, ((1, -2.0),))),
        {"e": "tokens", "i": 0, "t": [5, 6], "x": "x", "c": 2, "lp": [[[5, -0.5], [7, -1.0]], [[6, 0.0]]]}
        | {"plp": [None, [[1, -2.0]]]},
    ),
    (Released((17, 3)), {"e": "released"}),
    (
        Finished((17, 4), "stop", 2, True, Usage(3, 4, 1), None, Timing(1.5, 2.0, 3.0, 4.0), 3, (2,), "end"),
        {"e": "finished", "i": 3, "t": [2], "x": "end", "reason": "stop", "stop": 2}
        | {"usage": {"prompt": 3, "completion": 4, "cached": 1}}
        | {"timing": {"queued_ms": 1.5, "prefill_ms": 2.0, "first_token_ms": 3.0, "decode_ms": 4.0}, "done": True},
    ),
    (
        Finished((17, 4), "error", error=ErrorInfo("unsupported", "no", "n"), choice=3, timing=Timing(queued_ms=1.0)),
        {"e": "finished", "c": 3, "reason": "error", "error": {"code": "unsupported", "message": "no", "param": "n"}}
        | {"timing": {"queued_ms": 1.0}},
    ),
    (Finished((17, 4), "stop", "END"), {"e": "finished", "reason": "stop", "stop": "END"}),
    (
        Finished((0, 18), "cancelled", done=True, usage=Usage(0, 0), error=ErrorInfo("internal", "x")),
        {"e": "finished", "reason": "cancelled", "usage": {"prompt": 0, "completion": 0, "cached": 0}}
        | {"error": {"code": "internal", "message": "x"}, "done": True},
    ),
]


@pytest.mark.parametrize(("event", "fields"), EVENTS)
def test_events_are_these_bytes_and_come_back(event: Event, fields: dict[str, Any]) -> None:
    assert encode(to_map(event), "d") == ("d", msgpack.packb(fields))
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    assert encode(to_map(event), "json") == ("json", text.encode())
    for kind in ("d", "json"):
        field, payload = encode(to_map(event), kind)
        assert decode(format_id(event.id).encode(), {field.encode(): payload}) == event


def test_an_unknown_kind_is_none_and_unknown_fields_are_passed_over() -> None:
    assert decode(b"1-1", {b"json": b'{"e":"paused","why":[1,{}]}'}) is None
    assert decode("1-1", {b"d": pack({"e": "released", "later": 1}, "d"), b"more": b""}) == Released((1, 1))


def test_what_readers_take_though_no_worker_of_ours_writes_it() -> None:
    fields = {"e": "tokens", "i": 0, "t": [1], "x": "", "c": 0, "lp": None}
    assert decode(b"1-1", {b"d": pack(fields, "d")}) == Tokens((1, 1), 0, (1,))
    started = {
        "e": "started",
        "attempt": 1,
        "worker": "w",
        "job": "k with space 1-1",
        "resumed": [],
        "seed": 0,
        "fp": "f",
    }
    started["model"] = {"name": "", "fingerprint": "", "more": 1}
    event = decode(b"1-0", {b"json": pack(started, "json")})
    assert isinstance(event, Started)
    assert event.job == JobRef("k with space", "1-1")
    long = pack({"e": "tokens", "i": 0, "t": [], "x": "x" * (9 << 20)}, "d")
    assert decode(b"1-1", {b"d": long}) is not None  # the limit is for jobs


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"x": b""},
        {b"d": b""},
        {b"d": b"\xc1"},
        {b"json": b"[]"},
        {b"json": b"{}"},
        {b"json": b'{"e":1}'},
        {b"json": b'{"e":"queued"}'},
        {b"json": b'{"e":"queued","fp":null}'},
        {b"json": b'{"e":"tokens","t":[1]}'},
        {b"json": b'{"e":"tokens","i":true,"t":[1]}'},
        {b"json": b'{"e":"tokens","i":0,"t":[1.0]}'},
        {b"json": b'{"e":"tokens","i":0,"t":[true]}'},
        {b"json": b'{"e":"tokens","i":0,"t":"1"}'},
        {b"json": b'{"e":"tokens","i":0,"t":[1],"x":1}'},
        {b"json": b'{"e":"tokens","i":0,"t":[1],"lp":[[1]]}'},
        {b"json": b'{"e":"tokens","i":0,"t":[1],"lp":[1]}'},
        {b"json": b'{"e":"tokens","i":0,"t":[1],"plp":[[["a",1]]]}'},
        {b"json": b'{"e":"finished"}'},
        {b"json": b'{"e":"finished","reason":"tired"}'},
        {b"json": b'{"e":"finished","reason":"stop","stop":1.5}'},
        {b"json": b'{"e":"finished","reason":"stop","stop":true}'},
        {b"json": b'{"e":"finished","reason":"stop","done":1}'},
        {b"json": b'{"e":"finished","reason":"stop","usage":{"prompt":1}}'},
        {b"json": b'{"e":"finished","reason":"error","error":{"code":1,"message":""}}'},
        {b"json": b'{"e":"finished","reason":"stop","timing":{"queued_ms":"1"}}'},
        {b"json": b'{"e":"started"}'},
    ],
)
def test_an_entry_that_breaks_the_protocol_is_named(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(MalformedEntryError) as caught:
        decode(b"7-1", fields, "a-request")
    assert (caught.value.id, caught.value.entry_id) == ("a-request", "7-1")


@pytest.mark.parametrize(
    "raw", ["", "1", "-", "1-", "-1", "1-2-3", "a-1", "1-+2", "1_0-2", " 1-2", "1-2\n", "1" * 21 + "-1"]
)
def test_what_is_no_id_of_an_entry(raw: str) -> None:
    with pytest.raises(ValueError, match="not the id"):
        parse_id(raw)
    with pytest.raises(MalformedEntryError):
        decode(raw, {b"json": b'{"e":"released"}'})


def test_ids_order_as_the_server_orders_them() -> None:
    assert parse_id(b"18446744073709551615-0") == (2**64 - 1, 0)
    assert sorted(["2-0", "10-0", "0-99", "2-10", "2-9"], key=parse_id) == ["0-99", "2-0", "2-9", "2-10", "10-0"]


def test_the_short_way_to_a_tokens_map_is_the_same() -> None:
    assert tokens_map(3, [5], "x", 1) == {"e": "tokens", "i": 3, "t": [5], "x": "x", "c": 1}


@given(st.binary(max_size=10), st.dictionaries(st.sampled_from([b"d", b"json", b"x"]), st.binary(max_size=60)))
def test_any_entry_is_an_event_or_an_error(entry_id: bytes, fields: dict[bytes, bytes]) -> None:
    with contextlib.suppress(MalformedEntryError):
        decode(entry_id, fields)


NAMES = [
    *("i", "t", "x", "c", "lp", "plp", "reason", "stop", "usage", "error", "timing", "done", "fp", "job"),
    *("resumed", "seed", "model", "attempt", "worker", "metadata"),
]
SCALARS = st.none() | st.integers(-9, 9) | st.text(max_size=3) | st.booleans()
LISTS = st.lists(st.integers() | st.none(), max_size=3)
MAPS = st.dictionaries(st.sampled_from(["prompt", "code", "name", "queued_ms"]), st.integers() | st.text(max_size=2))
KINDS = ["queued", "started", "tokens", "released", "finished"]


@given(st.dictionaries(st.sampled_from(NAMES), SCALARS | LISTS | MAPS), st.sampled_from(KINDS))
def test_any_fields_are_an_event_or_an_error(fields: dict[str, Any], kind: str) -> None:
    with contextlib.suppress(MalformedEntryError):
        decode(b"1-1", {b"json": json.dumps({"e": kind, **fields}).encode()})


# --- the short way for `tokens` ---------------------------------------------------------------------------------------


def outcome(fields: Mapping[bytes, bytes]) -> Event | str | None:
    try:
        return decode(b"7-1", fields, "a")
    except MalformedEntryError as error:
        return str(error)


def both_ways(payload: bytes) -> tuple[Any, Any]:
    """What the decoder gives, and what it gives without the short way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "decode_tokens", lambda _at, _payload: None)
        long = outcome({b"d": payload})
    return outcome({b"d": payload}), long


SHORT = [
    {"e": "tokens", "i": 3, "t": [5]},
    {"e": "tokens", "i": 3, "t": []},
    {"e": "tokens", "i": 0, "t": [5, 2**64 - 1, -1], "x": "é", "c": 2},
    {"e": "tokens", "t": [5], "c": -1, "i": 2**63},
]


@pytest.mark.parametrize("fields", SHORT)
def test_the_short_way_is_taken_and_gives_the_same(fields: dict[str, Any]) -> None:
    payload = pack(fields, "d")
    short, long = both_ways(payload)
    assert decode_tokens((7, 1), payload) == short == long
    assert (type(short), hash(short), repr(short)) == (Tokens, hash(long), repr(long))
    with pytest.raises(dataclasses.FrozenInstanceError):
        short.text = "other"
    assert dataclasses.replace(short, index=9) == dataclasses.replace(long, index=9)
    assert copy.copy(short) == copy.deepcopy(short) == long


HEAD = b"\xa1e\xa6tokens"


@pytest.mark.parametrize(
    "payload",
    [
        pack({"e": "tokens", "i": 0, "t": [1], "x": "", "c": 0, "lp": None}, "d"),
        pack({"e": "tokens", "i": 0, "t": [1], "lp": [[[1, -0.5]]]}, "d"),
        pack({"e": "tokens", "i": 0, "t": [1], "later": 1}, "d"),
        pack({"i": 0, "t": [1], "e": "tokens"}, "d"),
        pack({"e": "tokens", "i": 0, "x": "a"}, "d"),
        pack({"e": "tokens", "i": 0, "t": [1], "x": None}, "d"),
        pack({"e": "tokens", "i": 0, "t": [True]}, "d"),
        pack({"e": "tokens", "i": False, "t": [1]}, "d"),
        pack({"e": "tokens", "i": 0, "t": [1], "c": 1.0}, "d"),
        pack({"e": "tokens", "i": 0, "t": [1], "x": "x" * 2000}, "d"),
        pack({"e": "tokens", "i": 0, "t": [1]}, "d") + b"\xc0",  # trailing bytes
        b"\x83" + HEAD + b"\xa1i\x00",  # cut off
        b"\x84" + HEAD + b"\xa1i\x00\xa1t\x91\x01\xa1i\x01",  # a field twice
        b"\x84" + HEAD + b"\xa1i\x00\xa1t\x91\x01\xa1e\xa8released",
        b"\x84" + HEAD + b"\xa1i\x00\xa1t\x91\x01\x01\x01",  # a key that is no string
        b"\x84" + HEAD + b"\xa1i\x00\xa1t\x91\x01\xa1x\xc4\x01a",  # bytes for text
        b"\x84" + HEAD + b"\xa1i\x00\xa1t\x91\x01\xc4\x01x\xa1a",  # bytes for a key
        b"\x84" + HEAD + b"\xa1i\x00\xa1t\x91\x01\xa1x\xa3\xed\xa0\x80",  # a lone surrogate
        b"\x84" + HEAD + b"\xa1i\x00\xa1t\x91\x01\xa1x\xa1\xff",  # no UTF-8
        b"\x83" + HEAD + b"\xa1i\xd6\xff\x00\x00\x00\x00\xa1t\x91\x01",  # a timestamp
        b"\x83" + HEAD + b"\xa1i\x00\xa1t\xdd\xff\xff\xff\xff\x01",  # a forged length
        b"\x83" + HEAD + b"\xa1i\x00\xa1t" + b"\x91" * 900 + b"\x01",
        b"\x93" + HEAD + b"\xa1i",  # an array
    ],
)
def test_what_is_not_short_or_not_right_goes_the_long_way(payload: bytes) -> None:
    assert decode_tokens((7, 1), payload) is None
    short, long = both_ways(payload)
    assert short == long


INTS = st.integers(-(2**63), 2**64 - 1)
FIELDS = st.fixed_dictionaries(
    {"i": SCALARS | INTS, "t": st.lists(INTS, max_size=3) | st.lists(SCALARS, max_size=3) | SCALARS},
    optional={"x": SCALARS, "c": SCALARS, "lp": SCALARS, "more": st.dictionaries(st.text(max_size=2), SCALARS)},
)


@given(FIELDS, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=3))
def test_the_short_way_never_differs(fields: dict[str, Any], spoilt: list[tuple[int, int]]) -> None:
    payload = bytearray(msgpack.packb({"e": "tokens", **fields}))
    for place, value in spoilt:
        payload[place % len(payload)] = value
    short, long = both_ways(bytes(payload))
    assert short == long
    assert type(short) is type(long)
