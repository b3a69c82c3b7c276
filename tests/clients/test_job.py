"""Entries of a jobs stream, and every field of a job's map: its default, its range, and its name in the refusal."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.clients import InvalidEntryError, InvalidJobError, PayloadError
from headrace.clients.job import Job, JobEntry, decode_entry, decode_job
from headrace.clients.options import CHECKS
from headrace.clients.payload import pack

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CHAT = [{"role": "user", "content": "hi"}]
FP = b"a" * 64


def job(kind: str = "d", **fields: Any) -> Job:
    return decode_job(pack({"prompt": "x", **fields}, kind), kind)


def refused_field(fields: dict[str, Any], kind: str = "d") -> str | None:
    with pytest.raises(InvalidJobError) as caught:
        decode_job(pack(fields, kind), kind)
    assert caught.value.code == "invalid_request"
    assert str(caught.value.param) in str(caught.value)
    return caught.value.param


def test_the_defaults_are_those_of_the_protocol() -> None:
    for payload, kind in ((b'{"prompt":"Hello"}', "json"), (pack({"prompt": "Hello"}, "d"), "d")):
        assert decode_job(payload, kind) == Job(
            prompt="Hello", max_tokens=256, min_tokens=0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0,
            repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, seed=None, stop=(),
            stop_token_ids=(), ignore_eos=False, include_stop=False, n=1, logprobs=None, prompt_logprobs=None,
            response_format=None, stream=True, timeout_ms=None, cache_salt="", metadata=None, traceparent=None,
            prompt_token_ids=None, messages=None, tools=None, chat_template_kwargs=None,
        )  # fmt: skip


def test_every_field_of_the_type_is_a_field_of_the_map_and_the_other_way_round() -> None:
    assert [field.name for field in dataclasses.fields(Job)] == [
        "prompt", "prompt_token_ids", "messages", "tools", "chat_template_kwargs", *list(CHECKS)[5:],
    ]  # fmt: skip


GOOD: dict[str, list[Any]] = {
    "prompt": ["", "한국어 😀"],
    "max_tokens": [1, 2**32 - 1, 2**63 - 1],
    "temperature": [0, 0.0, 1e-6, 1, 100],
    "top_p": [1, 1.0, 1e-9],
    "top_k": [0, 1, 2**31 - 1],
    "min_p": [0, 0.5, 1],
    "repetition_penalty": [0.01, 1, 100.0],
    "presence_penalty": [-2, 2.0],
    "frequency_penalty": [-2.0, 2],
    "seed": [0, 2**63 - 1],
    "ignore_eos": [True],
    "include_stop": [True],
    "n": [1, 16],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 20],
    "response_format": [{"type": "json_object"}, {}],
    "stream": [False],
    "timeout_ms": [1, 2**40],
    "cache_salt": ["", "tenant"],
    "metadata": [{}, {"a": [1, None, {"b": True}]}],
    "traceparent": [TRACEPARENT, "cc" + TRACEPARENT[2:] + "-what-comes-later"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
@pytest.mark.parametrize("kind", ["d", "json"])
def test_what_is_in_range_is_taken(name: str, value: Any, kind: str) -> None:
    found = getattr(job(kind, **{name: value}), name)
    assert found == value
    default = getattr(Job(), name)
    assert default is None or type(found) is type(default)


def test_a_whole_number_becomes_a_float_where_a_float_is_meant() -> None:
    found = job(temperature=1, top_p=1, presence_penalty=-1)
    assert [type(value) for value in (found.temperature, found.top_p, found.presence_penalty)] == [float] * 3


def test_lists_become_tuples() -> None:
    found = decode_job(
        pack({"prompt_token_ids": [0, 2**31 - 1], "stop": ["a", "b" * 1024], "stop_token_ids": [0]}, "d"), "d"
    )
    assert (found.prompt_token_ids, found.stop, found.stop_token_ids) == ((0, 2**31 - 1), ("a", "b" * 1024), (0,))
    found = decode_job(
        pack({"messages": [{**CHAT[0], "name": "x"}], "tools": [{"a": 1}], "chat_template_kwargs": {}}, "d"), "d"
    )
    assert found.messages == ({"role": "user", "content": "hi", "name": "x"},)
    assert found.tools == ({"a": 1},)
    assert found.chat_template_kwargs == {}


@pytest.mark.parametrize(
    ("kind", "biases"),
    [("d", {5: 1, 0: -1.5}), ("d", {"5": 1, "0": -1.5}), ("d", {5: 1, "0": -1.5}), ("json", {"5": 1, "0": -1.5})],
)
def test_token_ids_of_biases_are_integers_in_msgpack_and_decimal_strings_in_both(
    kind: str, biases: dict[Any, float]
) -> None:
    assert job(kind, logit_bias=biases).logit_bias == {5: 1.0, 0: -1.5}


NO_INT: list[Any] = [None, True, 1.0, "1", [1], {}]
NO_FLOAT: list[Any] = [None, True, "1", [1.0], float("nan"), float("inf"), -float("inf")]
NO_STR: list[Any] = [None, 1, True, ["a"], {}, b"a"]
NO_MAP: list[Any] = [None, 1, "a", [1], [["a", 1]], True]
BAD: dict[str, list[Any]] = {
    "max_tokens": [*NO_INT, 0, -1, 2**63],
    "min_tokens": [*NO_INT, -1, 257],
    "temperature": [*NO_FLOAT, -0.1, 1e-7, 100.1],
    "top_p": [*NO_FLOAT, 0, -0.5, 1.01],
    "top_k": [*NO_INT, -1, 2**31],
    "min_p": [*NO_FLOAT, -0.1, 1.1],
    "repetition_penalty": [*NO_FLOAT, 0, -1, 101],
    "presence_penalty": [*NO_FLOAT, -2.1, 2.1],
    "frequency_penalty": [*NO_FLOAT, -2.1, 2.1],
    "logit_bias": [
        *NO_MAP,
        {"a": 1},
        {"01": 1},
        {"+1": 1},
        {" 1": 1},
        {"-1": 1},
        {"1.0": 1},
        {"": 1},
        {"١": 1},
        {-1: 1},
        {2**31: 1},
        {"2147483648": 1},
        {1: "a"},
        {1: True},
        {1: None},
        {1: float("nan")},
        {1: 10000000.0},
        {5: 1, "5": 2},
        {1.0: 1},
        {True: 1},
        {None: 1},
        {b"1": 1},
        {1: {2: 3}},
    ],
    "seed": [*NO_INT, -1, 2**63],
    "stop": [None, "a", {}, [1], [None], [""], ["a"] * 65, ["a" * 1025], [b"a"], [["a"]]],
    "stop_token_ids": [None, 1, "a", ["1"], [True], [1.0], [-1], [2**31], [1] * 1025, [[1]]],
    "ignore_eos": [None, 0, 1, "true"],
    "include_stop": [None, 0, 1, "true"],
    "n": [*NO_INT, 0, 17],
    "logprobs": [*NO_INT, -1, 21],
    "prompt_logprobs": [*NO_INT, -1, 21],
    "response_format": NO_MAP,
    "stream": [None, 0, 1, "no"],
    "timeout_ms": [*NO_INT, 0, -1],
    "cache_salt": NO_STR,
    "metadata": [*NO_MAP, {"a": "x" * (16 << 10)}, {1: 2}, {"a": {1: 2}}, {"a": b"x"}, {"a": float("inf")}],
    "traceparent": [
        *NO_STR,
        "",
        TRACEPARENT.upper(),
        TRACEPARENT + "-x",
        "ff" + TRACEPARENT[2:],
        TRACEPARENT[:-1],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{'1' * 32}-{'0' * 16}-01",
        TRACEPARENT + "\n",
        " " + TRACEPARENT,
    ],
    "prompt": [],
    "unknown": [None, 1],
    "Prompt": ["a"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_what_is_not_is_refused_by_its_name(name: str, value: Any) -> None:
    assert refused_field({"prompt": "x", name: value}) == name


@pytest.mark.parametrize("name", [name for name in BAD if name != "logit_bias"])
def test_so_is_it_in_json(name: str) -> None:
    for value in BAD[name]:
        if not isinstance(value, float | dict | list | bytes):
            assert refused_field({"prompt": "x", name: value}, "json") == name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "prompt"),
        ({"max_tokens": 1}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1], "messages": CHAT}, "messages"),
        ({"messages": CHAT, "prompt": "a"}, "messages"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt_token_ids": [1], "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"prompt": None}, "prompt"),
        ({"prompt": b"a"}, "prompt"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": ["a"]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": 1, "content": ""}]}, "messages"),
        ({"messages": [*CHAT, {"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": {"role": "user", "content": ""}}, "messages"),
        ({"messages": CHAT, "tools": [1]}, "tools"),
        ({"messages": CHAT, "tools": {}}, "tools"),
        ({"messages": CHAT, "chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_fields_that_do_not_go_together_or_have_a_shape(fields: dict[str, Any], name: str) -> None:
    assert refused_field(fields) == name


def test_metadata_is_measured_as_compact_json_in_utf8() -> None:
    room = (16 << 10) - len('{"a":""}')
    assert job(metadata={"a": "x" * room}).metadata == {"a": "x" * room}
    assert refused_field({"prompt": "x", "metadata": {"a": "x" * (room + 1)}}) == "metadata"
    assert refused_field({"prompt": "x", "metadata": {"a": "한" * (room // 3 + 1)}}) == "metadata"


def test_a_payload_that_is_none_has_another_code() -> None:
    with pytest.raises(PayloadError) as caught:
        decode_job(b"{", "json")
    assert caught.value.code == "payload_undecodable"


def test_the_message_holds_no_prompt() -> None:
    for fields in (
        {"prompt": ["secret"]},
        {"messages": [{"role": "secret"}]},
        {"prompt": "a", "stop": ["secret" * 999]},
    ):
        with pytest.raises(InvalidJobError) as caught:
            decode_job(pack(fields, "d"), "d")
        assert "secret" not in str(caught.value)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
LISTS = st.lists(st.integers() | st.text(max_size=3), max_size=3)
MAPS = st.dictionaries(st.text(max_size=3), st.floats())


@given(st.dictionaries(st.sampled_from(list(CHECKS)), SCALARS | LISTS | MAPS))
def test_any_values_give_a_job_or_a_refusal_of_one_of_them(fields: dict[str, Any]) -> None:
    try:
        payload = pack(fields, "d")
    except PayloadError:
        return
    try:
        assert isinstance(decode_job(payload, "d"), Job)
    except InvalidJobError as error:
        assert error.code == "invalid_request"
        assert error.param in {*fields, "prompt"}


# --- entries ----------------------------------------------------------------------------------------------------------


def test_entries_are_taken_apart() -> None:
    assert decode_entry({b"id": b"a", b"job": b"x"}) == JobEntry("a", "d", b"x", None)
    fields = {b"id": b"a", b"json": b"x", b"v": b"1", b"fp": FP}
    assert decode_entry(fields) == JobEntry("a", "json", b"x", FP.decode())


@pytest.mark.parametrize(
    ("fields", "param", "request_id", "kind"),
    [
        ({}, "id", None, "d"),
        ({b"json": b"{}"}, "id", None, "json"),
        ({b"id": b"", b"job": b""}, "id", None, "d"),
        ({b"id": b"a b", b"job": b""}, "id", None, "d"),
        ({b"id": b"\xff", b"job": b""}, "id", None, "d"),
        ({b"id": b"x" * 129, b"job": b""}, "id", None, "d"),
        ({b"id": b"a"}, "job", "a", "d"),
        ({b"id": b"a", b"job": b"", b"json": b""}, "job", "a", "d"),
        ({b"id": b"a", b"json": b"", b"v": b"2"}, "v", "a", "json"),
        ({b"id": b"a", b"job": b"", b"v": b""}, "v", "a", "d"),
        ({b"id": b"a", b"job": b"", b"v": b"01"}, "v", "a", "d"),
        ({b"id": b"a", b"job": b"", b"more": b""}, "more", "a", "d"),
        ({b"id": b"a", b"job": b"", b"\xff\n": b""}, "\\xff\n", "a", "d"),
        ({b"id": b"a", b"job": b"", b"fp": b"x"}, "fp", "a", "d"),
        ({b"id": b"a", b"job": b"", b"fp": FP.upper()}, "fp", "a", "d"),
    ],
)
def test_an_entry_that_cannot_be_says_why_and_whose(
    fields: dict[bytes, bytes], param: str, request_id: str | None, kind: str
) -> None:
    with pytest.raises(InvalidEntryError) as caught:
        decode_entry(fields)
    error = caught.value
    assert (error.code, error.param, error.id, error.kind) == ("payload_undecodable", param, request_id, kind)


@given(st.dictionaries(st.binary(max_size=5) | st.sampled_from([b"id", b"job", b"json", b"v", b"fp"]), st.binary()))
def test_any_entry_is_taken_apart_or_refused(fields: dict[bytes, bytes]) -> None:
    try:
        assert decode_entry(fields).id
    except InvalidEntryError as error:
        assert error.code == "payload_undecodable"


def test_a_small_job_is_decoded_in_microseconds() -> None:
    fields = {"prompt": "Hello, " * 10, "max_tokens": 64, "temperature": 0.7, "top_p": 0.9, "seed": 5, "stop": ["\n\n"]}
    for kind in ("d", "json"):
        payload = pack(fields, kind)
        fastest_s = min(_time_of(payload, kind) for _ in range(200))
        assert fastest_s < 100e-6  # about 13 µs on an idle core; the limit is for a busy machine


def _time_of(payload: bytes, kind: str) -> float:
    started_s = time.perf_counter()
    decode_job(payload, kind)
    return time.perf_counter() - started_s
