"""Decoding at the edge: what is refused, under which code, by which name, how fast, and without making room."""

from __future__ import annotations

import json
import math
import resource
import time
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.clients import PayloadError
from headrace.clients.payload import MAX_PAYLOAD_BYTES, pack, unpack

UNDECODABLE, INVALID = "payload_undecodable", "invalid_request"


def refusal(data: bytes, kind: str = "d") -> tuple[str, str | None]:
    with pytest.raises(PayloadError) as caught:
        unpack(data, kind)
    return caught.value.code, caught.value.param


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\x81\xa1a",
        b"\x81\xa5ab",
        b"\x81\xa1a\xa1\xff",  # no UTF-8
        b"\x81\xa1a\xa2\xc3\x28",
        b"\xdd\x7f\xff\xff\xff",  # 2 G items
        b"\xdf\x7f\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",  # 4 GiB
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x05",
        b"\x81\xa1a\xdd\x00\x7f\xff\xff" + b"\xdd\x00\x7f\xff\xff" * 1000 + b"\x00" * (8 << 18),
        b"\x81\xa1a\xde\xff\xff",
    ],
)
def test_bytes_that_are_no_msgpack(data: bytes) -> None:
    assert refusal(data) == (UNDECODABLE, "job")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"{",
        b'{"a"',
        b'{"a":1,}',
        b"{'a':1}",
        b"\xff",
        b'{"a":"\xff"}',
        b"\xef\xbb\xbf{}",
        b'{"a":"\n"}',
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-32-le"),
        b"nul",
        b"\x82\xa1a\x01",
    ],
)
def test_bytes_that_are_no_json(data: bytes) -> None:
    assert refusal(data, "json") == (UNDECODABLE, "json")


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"\x90", "job"),  # not a map
        (b"\xc0", "job"),
        (b"\x80\x80", "job"),  # trailing
        (b"\x82\xa1a\x01\xa1a\x02", "a"),  # duplicate
        (b"\x81\xa1a\x82\xa1b\x01\xa1b\x02", "a"),
        (b"\x81\x05\x01", "5"),  # keys
        (b"\x81\xc0\x01", "job"),
        (b"\x81\x90\x01", "job"),
        (b"\x81\xc4\x01a\x01", "job"),
        (b"\x81\xa1a\x81\x05\x01", "a"),
        (b"\x81\xa1a\x81\x90\x01", "a"),
        (b"\x81\xa1a\xc4\x01a", "a"),  # bytes
        (b"\x81\xa1a\x91\xc4\x01a", "a"),
        (b"\x81\xa1a\xd4\x05\x00", "a"),  # extensions; -1 is a timestamp, real or not
        (b"\x81\xa1a\xd6\xff\x00\x00\x00\x00", "a"),
        (b"\x82\xa1b\x01\xa1a\xd4\xff\x00", "a"),
        (b"\x81\xa1a\xd7\xff" + b"\xff" * 8, "a"),
        (b"\x81\xa1a\xc7\x00\x07", "a"),
        (b"\x81\xa1a\xcb\x7f\xf8" + b"\x00" * 6, "a"),  # NaN
        (b"\x81\xa1a\xcb\x7f\xf0" + b"\x00" * 6, "a"),  # infinity
        (b"\x81\xa1a\xca\xff\x80\x00\x00", "a"),
        (b"\x81\xa1a\xa3\xed\xa0\xbd", "a"),  # a lone surrogate
        (b"\x81\xa1a\xa6\xed\xa0\xbd\xed\xb8\x80", "a"),  # a pair, but in UTF-8 that is two lone ones
        (b"\x81\xa1a\x81\xa3\xed\xa0\xbd\x01", "a"),
        (b"\x81\xa1a" + b"\x91" * 32 + b"\xc0", "a"),  # nesting
        (b"\x81\xa1a" * 33 + b"\xc0", "a"),
        (b"\x81\xa1a" + b"\x91" * 31 + b"\x80", "a"),
        (b"\x82\xa1b\x01\xa1a" + b"\x91" * 5000 + b"\xc0", "a"),
        (b"\x81\xa1a" + b"\x81\xa1a" * 200_000, "a"),
    ],
)
def test_msgpack_against_the_rules_names_the_field(data: bytes, param: str) -> None:
    assert refusal(data) == (INVALID, param)


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("[]", "json"),
        ("1", "json"),
        ("{} {}", "json"),
        ('{"a":1}x', "json"),
        ('{"a":1,"b":2,"a":1}', "a"),
        ('{"m":{"a":1,"a":1}}', "m"),
        ('{"a":[{"b":[{"c":1,"c":2}]}]}', "a"),
        ('{"a":NaN}', "a"),
        ('{"a":[1,-Infinity]}', "a"),
        ('{"a":1e999}', "a"),
        ('{"a":18446744073709551616}', "a"),
        ('{"a":[1,2,-9223372036854775809]}', "a"),
        ('{"b":1,"a":' + "9" * 5000 + "}", "a"),
        ('{"a":"\\ud83d"}', "a"),
        ('{"a":"\\ud83d\\ud83d"}', "a"),
        ('{"\\ude00":1}', "\\ude00"),
        ('{"b":{},"a":' + "[" * 32 + "]" * 32 + "}", "a"),
        ('{"b":"]\\"[","a":' + "[" * 200_000, "a"),
        ('{"a":' + '{"x":' * 100_000 + "1", "a"),
    ],
)
def test_json_against_the_rules_names_the_field(text: str, param: str) -> None:
    assert refusal(text.encode(), "json") == (INVALID, param)


def test_invalid_utf8_surrogates_in_json_are_named_too() -> None:
    assert refusal(b'{"a":"\xed\xa0\xbd"}', "json") == (INVALID, "a")


def test_a_name_that_is_no_name_is_shown_in_bounds() -> None:
    code, param = refusal(pack({"k" * 1000: float("nan")}, "d"))
    assert (code, param) == (INVALID, "k" * 64 + "…")


def test_what_stands_at_the_limits_is_taken() -> None:
    deep: Any = 1
    for _ in range(31):
        deep = [deep]
    document = {"deep": deep, "low": -(2**63), "high": 2**64 - 1, "list": [2**64 - 1], "text": "😀\u0000", "none": None}
    assert unpack(pack(document, "d"), "d") == document
    assert unpack(pack(document, "json"), "json") == document
    assert unpack(b"\x81\xa1a" * 32 + b"\xc0", "d")
    assert unpack(b' \n{"a":"\\ud83d\\ude00"}\t', "json") == {"a": "😀"}
    assert unpack(b"\x81\xd9\x01a\x01", "d") == {"a": 1}  # a longer header than needed is no fault


@pytest.mark.parametrize("kind", ["d", "json"])
def test_the_limit_of_the_payload(kind: str) -> None:
    payload = pack({"a": "x" * 100}, kind)
    assert unpack(payload, kind, max_bytes=len(payload)) == {"a": "x" * 100}
    with pytest.raises(PayloadError) as caught:
        unpack(payload, kind, max_bytes=len(payload) - 1)
    assert (caught.value.code, caught.value.param) == (INVALID, "job" if kind == "d" else "json")
    assert MAX_PAYLOAD_BYTES == 8 * 1024 * 1024


FORGED = [
    b"\xdd\x7f\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\x00\x7f\xff\xff" * 1000 + b"\x00" * (7 << 20),
    b"\xdc\xff\xff" * 1000,
    b"\x81\xa1a" + b"\xde\xff\xff\xa1a" * 500,
]


@pytest.mark.parametrize("data", FORGED)
def test_a_forged_length_is_refused_at_once_and_makes_no_room(data: bytes) -> None:
    refusal(data)  # warm
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fastest_s = 1.0
    for _ in range(5):  # the machine may be busy: the fastest counts
        started_s = time.perf_counter()
        refusal(data)
        fastest_s = min(fastest_s, time.perf_counter() - started_s)
    assert fastest_s < 0.01
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 4096


@pytest.mark.parametrize("value", [{"a": object()}, {"a": "\ud83d"}, {"a": 2**70}, {b"a": 1, "b": {1}}])
def test_what_cannot_be_packed_is_a_payload_error(value: dict[Any, Any]) -> None:
    for kind in ("d", "json"):
        if kind == "json" and value == {"a": 2**70}:
            continue  # JSON has no limit; the reader of it has
        with pytest.raises(PayloadError):
            pack(value, kind)


def test_json_cannot_hold_nan_and_nothing_holds_itself() -> None:
    with pytest.raises(PayloadError):
        pack({"a": float("nan")}, "json")
    ring: dict[str, Any] = {}
    ring["ring"] = ring
    for kind in ("d", "json"):
        with pytest.raises(PayloadError):
            pack(ring, kind)


def test_no_message_holds_what_was_in_the_payload() -> None:
    prompt = "the-secret-prompt"
    for data, kind in [
        (msgpack.packb({"prompt": [prompt, float("nan")]}), "d"),
        (f'{{"prompt": "{prompt}", "a": '.encode(), "json"),
        (f'{{"prompt": "{prompt}\\ud83d"}}'.encode(), "json"),
        (msgpack.packb({"prompt": prompt}) + prompt.encode(), "d"),
        (b"\x81\xa6prompt\xb2" + prompt.encode() + b"\xff", "d"),
    ]:
        with pytest.raises(PayloadError) as caught:
            unpack(data, kind)
        assert prompt not in str(caught.value)


# --- anything at all --------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@given(st.binary(max_size=200) | st.binary(min_size=1, max_size=60).map(lambda tail: b"\x83\xa1a" + tail))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    for kind in ("d", "json"):
        try:
            found = unpack(data, kind)
        except PayloadError as error:
            assert error.code in (UNDECODABLE, INVALID)
            assert error.param
        else:
            assert pack(found, kind)


@given(st.dictionaries(st.text(), VALUES, max_size=5), st.integers(0, 1000), st.binary(min_size=1, max_size=1))
def test_damaged_documents_do_no_more_than_be_refused(document: dict[str, Any], at: int, byte: bytes) -> None:
    try:
        good = msgpack.packb(document, unicode_errors="surrogatepass")
    except (OverflowError, ValueError):  # integers that msgpack does not hold
        return
    place = at % len(good)
    for data in (good[:place], good[:place] + byte + good[place + 1 :], good + byte):
        try:
            unpack(data, "d")
        except PayloadError as error:
            assert error.code in (UNDECODABLE, INVALID)


@given(st.text(alphabet='{}[]",:\\u0123456789.eE+-truefalsn dD8', max_size=60).map(lambda text: '{"a":' + text))
def test_almost_json_does_no_more_than_be_refused(text: str) -> None:
    try:
        unpack(text.encode(), "json")
    except PayloadError as error:
        assert error.code in (UNDECODABLE, INVALID)


def plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(plain, value))
    if isinstance(value, dict):
        return all(plain(key) and plain(item) for key, item in value.items())
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    if isinstance(value, str):
        return not any(0xD800 <= ord(character) < 0xE000 for character in value)
    return value is None or (isinstance(value, float) and math.isfinite(value))


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_exactly_the_plain_documents_come_back_as_they_were(document: dict[str, Any]) -> None:
    try:
        packed = msgpack.packb(document, unicode_errors="surrogatepass")
    except (OverflowError, ValueError):
        return
    if plain(document):
        assert unpack(packed, "d") == document
        assert unpack(json.dumps(document).encode(), "json") == document
    else:
        with pytest.raises(PayloadError) as caught:
            unpack(packed, "d")
        assert caught.value.code == INVALID


@pytest.mark.parametrize("kind", ["d", "json"])
@pytest.mark.parametrize("value", ["a\ud800", {"a": {1, 2}}, object()])
def test_what_cannot_be_packed_is_named(kind: Any, value: object) -> None:
    with pytest.raises(PayloadError) as caught:
        pack({"max_tokens": 3, "prompt": value}, kind)
    assert caught.value.param == "prompt"
