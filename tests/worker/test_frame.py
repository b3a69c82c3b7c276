"""The appends written out by hand are what hiredis would have made of them."""

from __future__ import annotations

from typing import Any, cast

import hiredis
import pytest

from headrace.clients.keys import Keys
from headrace.clients.lua import APPEND
from headrace.worker.cluster import slot_of
from headrace.worker.frame import frame_append, frame_head, hash_tag
from headrace.worker.writer import Append

pack = cast("Any", hiredis).pack_command


@pytest.mark.parametrize("field", [b"d", b"json"])
@pytest.mark.parametrize(("ttl_ms", "clears"), [(0, False), (600_000, False), (600_000, True), (0, True)])
@pytest.mark.parametrize("previous_id", [b"", b"0-1700000000000", b"1700000000001-9"])
@pytest.mark.parametrize("payload", [b"", b"x", b"\r\n$3\r\n\x00\xff" * 100, bytes(range(256)) * 300])
def test_a_framed_append_is_the_packed_one(
    field: bytes, ttl_ms: int, clears: bool, previous_id: bytes, payload: bytes
) -> None:
    keys = Keys("p.r_e-f", "q")
    out, cancel = keys.out("my:1"), keys.cancel("my:1")
    append = Append(3, previous_id, b"1700000000001-10", payload, ttl_ms, clears, again=False)
    framed = frame_append(frame_head(out, cancel), field, append)
    command = ("EVALSHA", APPEND.sha, 2, out, cancel, previous_id, b"1700000000001-10", field, payload, ttl_ms)
    assert framed == pack((*command, b"1" if clears else b"0"))
    assert slot_of(hash_tag(framed)) == slot_of(out)
