"""The compare-and-append as it goes over the wire (RESP), written out: it is sent once for every token.

    *11 EVALSHA <sha> 2 <out> <cancel>  │  <previous id> <id> <field> <payload> <ttl> <clears>
    made once per attempt               │  made per entry

hiredis takes three times as long for the whole of it, and needs a tuple made first. All other commands go through it.
"""

from __future__ import annotations

from ..clients.lua import APPEND
from .writer import Append

_NOTHING_MORE = b"$1\r\n0\r\n$1\r\n0\r\n"  # the TTL stays as it is, the flag is left alone


def frame_head(out: str, cancel: str) -> bytes:
    """What all appends to a request's stream begin with."""
    words = (b"EVALSHA", APPEND.sha.encode(), b"2", out.encode(), cancel.encode())
    return b"*11\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def frame_append(head: bytes, field: bytes, append: Append) -> bytes:
    """The whole command. `field` is the entry's one field, `d` or `json`."""
    _, previous_id, entry_id, payload, ttl_ms, clears_flag, _ = append
    rest = _NOTHING_MORE
    if ttl_ms or clears_flag:
        ttl = b"%d" % ttl_ms
        rest = b"$%d\r\n%b\r\n$1\r\n%d\r\n" % (len(ttl), ttl, clears_flag)
    return b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n%b" % (
        *(head, len(previous_id), previous_id, len(entry_id), entry_id),
        *(len(field), field, len(payload), payload, rest),
    )


def hash_tag(frame: bytes) -> bytes:
    """The part of the stream's key that decides on its slot, braces included: nothing before it can hold a brace."""
    return frame[frame.index(b"{") : frame.index(b"}") + 1]
