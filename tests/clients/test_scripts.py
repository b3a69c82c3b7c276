"""The two scripts, on Valkey and on Redis."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace.clients.keys import Keys
from headrace.clients.lua import APPEND, CANCEL
from headrace.clients.payload import pack
from tests.support.server import Server

KEYS = Keys("scripts", "q")
OUT, FLAG = KEYS.out("r"), KEYS.cancel("r")


@pytest.fixture
def db(each_server: Server) -> Iterator[redis.Redis]:
    with each_server.client() as client:
        client.flushall()
        yield client


def append(db: redis.Redis, newest: str, at: str, payload: bytes = b"x", ttl: int = 0, unflag: str = "0") -> list[Any]:
    return db.eval(APPEND.source, 2, OUT, FLAG, newest, at, "d", payload, ttl, unflag)


def cancel(db: redis.Redis, newest: str, ttl_ms: int = 5000) -> list[Any]:
    return db.eval(CANCEL.source, 2, OUT, FLAG, newest, ttl_ms)


def test_the_head_of_a_script_is_its_key_layout_and_the_hash_is_the_servers(
    scripts_folder: Path, db: redis.Redis
) -> None:
    for script in (APPEND, CANCEL):
        text = (scripts_folder / f"{script.name}.lua").read_text()
        assert text == script.source
        assert (
            text.index("KEYS[1]  P:req:{ID}:out") < text.index("KEYS[2]  P:req:{ID}:cancel") < text.index("redis.call")
        )
        assert db.script_load(script.source) in (script.sha, script.sha.encode())
        assert script.sha == hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def test_a_writer_that_is_up_to_date_appends(db: redis.Redis) -> None:
    assert append(db, "", "0-5", b"a", ttl=9000) == [1, 0]
    assert append(db, "0-5", "7-0", b"b") == [1, 0]
    assert db.xrange(OUT) == [(b"0-5", {b"d": b"a"}), (b"7-0", {b"d": b"b"})]
    assert 8000 < db.pttl(OUT) <= 9000  # 0 left it alone
    assert append(db, "7-0", "7-1", ttl=60_000) == [1, 0]
    assert 59_000 < db.pttl(OUT) <= 60_000


@pytest.mark.parametrize("newest", ["", "0-4", "0-6", "7-0", "5-0"])
def test_a_stale_writer_learns_the_newest_id_and_changes_nothing(db: redis.Redis, newest: str) -> None:
    append(db, "", "0-5", b"a", ttl=9000)
    db.set(FLAG, "1", px=9000)
    assert append(db, newest, "9-9", b"b", ttl=60_000, unflag="1") == [0, b"0-5"]
    assert db.xlen(OUT) == 1
    assert db.pttl(OUT) <= 9000
    assert db.exists(FLAG)


def test_the_same_append_twice_is_in_once(db: redis.Redis) -> None:
    append(db, "", "0-5", ttl=9000)
    assert append(db, "0-5", "7-0", b"b") == [1, 0]
    assert append(db, "0-5", "7-0", b"b") == [0, b"7-0"]
    assert db.xlen(OUT) == 2


def test_a_stream_that_is_gone(db: redis.Redis) -> None:
    assert append(db, "0-5", "7-0") == [0, b""]
    assert not db.exists(OUT)


def test_every_append_says_whether_the_request_is_cancelled(db: redis.Redis) -> None:
    db.set(FLAG, "1", px=9000)
    assert append(db, "", "7-0", ttl=9000) == [1, 1]
    assert append(db, "7-0", "7-1") == [1, 1]
    assert append(db, "7-1", "7-2", unflag="1") == [1, 0]
    assert not db.exists(FLAG)


def test_an_append_that_the_server_refuses_leaves_nothing_behind(db: redis.Redis) -> None:
    append(db, "", "7-0", ttl=9000)
    with pytest.raises(redis.ResponseError, match="equal or smaller"):
        append(db, "7-0", "6-0", ttl=60_000)
    assert db.pttl(OUT) <= 9000


def test_a_flag_lives_as_long_as_the_stream_has_left(db: redis.Redis) -> None:
    append(db, "", "7-0", ttl=60_000)
    ok, ttl_ms = cancel(db, "7-0")
    assert ok == 1
    assert 59_000 < ttl_ms <= 60_000
    assert db.get(FLAG) == b"1"
    assert 59_000 < db.pttl(FLAG) <= 60_000


def test_a_flag_without_a_stream_lives_as_told(db: redis.Redis) -> None:
    assert cancel(db, "", 86_400_000) == [1, 86_400_000]
    assert 86_000_000 < db.pttl(FLAG) <= 86_400_000


@pytest.mark.parametrize("newest", ["", "6-0", "7-1"])
def test_no_flag_if_the_stream_has_gone_on(db: redis.Redis, newest: str) -> None:
    append(db, "", "7-0", ttl=9000)
    assert cancel(db, newest) == [0, b"7-0"]
    assert not db.exists(FLAG)


def test_no_flag_if_the_stream_has_gone(db: redis.Redis) -> None:
    assert cancel(db, "7-0") == [0, b""]
    assert not db.exists(FLAG)


@pytest.mark.parametrize(
    ("field", "fields", "set_it"),
    [
        ("d", {"e": "tokens", "i": 0, "t": [1], "x": "한"}, True),
        ("d", {"e": "finished", "reason": "stop"}, True),  # one choice of several
        ("d", {"e": "finished", "reason": "stop", "done": True}, False),
        ("json", {"e": "tokens", "i": 0, "t": [1], "done": True}, True),
        ("json", {"e": "finished", "reason": "stop", "done": True}, False),
    ],
)
def test_from_afar_the_script_looks_itself_whether_the_request_has_ended(
    db: redis.Redis, field: str, fields: dict[str, Any], set_it: bool
) -> None:
    db.eval(APPEND.source, 2, OUT, FLAG, "", "7-0", field, pack(fields, field), 9000, "0")
    assert cancel(db, "*")[0] == int(set_it)
    assert db.exists(FLAG) == int(set_it)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x01", b"{"])
def test_from_afar_nothing_is_set_for_what_cannot_be_read(db: redis.Redis, payload: bytes) -> None:
    assert cancel(db, "*") == [0, b""]
    append(db, "", "7-0", payload, ttl=9000)
    assert cancel(db, "*") == [0, b"7-0"]
    assert not db.exists(FLAG)
