"""msgpack to a tree of Python values, without ever making room for what is not there."""

from __future__ import annotations

import re
from typing import Any, NoReturn, cast

import msgpack

from ._edges import EXTENSION, TOO_DEEP, TRAILING, invalid, map_of, undecodable
from .errors import shown_name

# Items that need no look inside: small containers, numbers, nil, booleans, short strings with their bytes.
_PLAIN = re.compile(
    b"(?:"
    + b"|".join(
        [rb"[\x00-\x9f\xc0\xc2\xc3\xe0-\xff]", rb"[\xcc\xd0].", rb"[\xcd\xd1]..", rb"[\xce\xd2\xca].{4}"]
        + [rb"[\xcf\xd3\xcb].{8}"]
        + [b"\\x%02x.{%d}" % (0xA0 + length, length) for length in range(32)]
    )
    + b")*+",
    re.DOTALL,
)
# First byte of strings, binaries and extensions → (bytes of its length, bytes beside the length).
_SIZED = {
    **{0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0), 0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0)},
    **{0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)},
    **{0xD4: (0, 2), 0xD5: (0, 3), 0xD6: (0, 5), 0xD7: (0, 9), 0xD8: (0, 17)},
}
# First byte of arrays and maps → (bytes of its length, items per unit of length).
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}

_lib = cast("Any", msgpack)  # it has no type information
_Packer: Any = _lib.Packer
_ERRORS: tuple[type[Exception], ...] = (ValueError, _lib.UnpackException)


def decode(data: bytes, whole: str) -> object:
    """The value in `data`. Extensions and binaries are left in it for the walk, which can name their field.

    Raises PayloadError; `whole` is what it names where the fault is not in one field.
    """
    if not data:
        raise undecodable("msgpack: it is empty", whole)
    _check_lengths(data, whole)
    unpacker = _unpacker(data)
    try:
        decoded = unpacker.unpack()
    except _ERRORS as error:
        _raise_for(data, error, whole)
    if unpacker.tell() != len(data):
        raise invalid(TRAILING, whole)
    return decoded


def encode(value: object) -> bytes:
    """The value as msgpack. Raises TypeError, ValueError or OverflowError for what that cannot hold."""
    # A packer of one's own with a small buffer: packb reserves a quarter of a megabyte for every call.
    return _Packer(buf_size=1024).pack(value)


def _unpacker(data: bytes) -> Any:
    size = len(data)  # one limit for all lengths: nothing in the data can be longer than the data
    unpacker = _lib.Unpacker(
        raw=False,
        strict_map_key=False,  # keys are looked at by the walk, which can name the field
        unicode_errors="surrogatepass",  # so are surrogates; other invalid UTF-8 still raises
        object_pairs_hook=map_of,
        max_buffer_size=size,
        max_str_len=size,
        max_bin_len=size,
        max_array_len=size,
        max_map_len=size,
        max_ext_len=size,
    )
    unpacker.feed(data)
    return unpacker


def _raise_for(data: bytes, error: Exception, whole: str) -> NoReturn:
    """Tell by a second look what `error` came from: msgpack names neither the field nor, in part, the fault."""
    if isinstance(error, _lib.StackError):
        raise invalid(TOO_DEEP, _field_at_fault(data, whole)) from error
    try:
        _unpacker(data).skip()  # looks at the structure only
    except _ERRORS:
        raise undecodable("msgpack", whole) from error
    if isinstance(error, UnicodeDecodeError):
        raise undecodable("msgpack with text in UTF-8", whole) from error
    # The structure holds and every string decodes: what is left is a timestamp, an extension, that is none.
    raise invalid(EXTENSION, _field_at_fault(data, whole)) from error


def _field_at_fault(data: bytes, whole: str) -> str:
    """The field of the top map whose value does not decode; `whole` if there is no top map."""
    unpacker = _unpacker(data)
    field = whole
    try:
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack()
            field = shown_name(key) if isinstance(key, str) else whole
            unpacker.unpack()
    except _ERRORS:
        return field
    return whole


def _check_lengths(data: bytes, whole: str) -> None:
    """Refuse containers that claim more items than there are bytes, before msgpack makes room for the items.

    msgpack's own limits are for one container; a thousand nested in each other would each get room for that many.
    """
    pos, size, claimed = 0, len(data), 0
    while (pos := cast("re.Match[bytes]", _PLAIN.match(data, pos)).end()) < size:
        first = data[pos]
        if first in _CONTAINERS:
            length_bytes, per_unit = _CONTAINERS[first]
            claimed += per_unit * int.from_bytes(data[pos + 1 : pos + 1 + length_bytes], "big")
            if claimed > size:
                raise undecodable("msgpack: a length past its end", whole)
            pos += 1 + length_bytes
        elif first in _SIZED:
            length_bytes, beside = _SIZED[first]
            pos += 1 + length_bytes + beside + int.from_bytes(data[pos + 1 : pos + 1 + length_bytes], "big")
            if pos > size:
                raise undecodable("msgpack: a length past its end", whole)
        else:
            return  # cut off, or no msgpack: decoding stops here too, and says so
