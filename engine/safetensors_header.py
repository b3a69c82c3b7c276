"""The header of a safetensors file, checked in full before anything is made of it.

    8 bytes   length of the header, little-endian
    header    JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, and strings under "__metadata__"
    data      the tensors, one after the other, without a gap

Source of the format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, cast

from .json_file import parse_json

MOST_HEADER_BYTES = 16 << 20  # room for 100 000 tensors in one file; the format itself would allow 100 MB
MOST_DIMENSIONS = 16
_LENGTH_BYTES = 8
_MOST_SIZE = 1 << 62
_NAME_SHOWN = 100
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip


class HeaderError(ValueError):
    """The file's header is none, or contradicts itself or the file; the message completes "…: "."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    dtype: str  # as the format calls it, one of ITEM_BYTES
    shape: tuple[int, ...]
    begin: int  # first byte, counted from the beginning of the file
    num_bytes: int


def read_header(file: BinaryIO, file_bytes: int) -> tuple[StoredTensor, ...]:
    """Read the header of a file of `file_bytes`; give its tensors in the order of their bytes.

    Raises HeaderError, and OSError from reading.
    """
    file.seek(0)
    first = file.read(_LENGTH_BYTES)
    if len(first) < _LENGTH_BYTES:
        raise HeaderError(f"it has only {len(first)} bytes")
    length = int.from_bytes(first, "little")
    if length > file_bytes - _LENGTH_BYTES:
        raise HeaderError(f"its header should have {length} bytes, and the whole file has {file_bytes}")
    if length > MOST_HEADER_BYTES:
        raise HeaderError(f"its header has {length} bytes, and at most {MOST_HEADER_BYTES} are read")
    content = file.read(length)
    if not content.startswith(b"{"):
        raise HeaderError("its header is no JSON object")
    try:
        entries = cast("dict[str, object]", parse_json(content, unique=True))
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"its header is no JSON that can be read: {error}") from error
    entries.pop("__metadata__", None)
    data_begin = _LENGTH_BYTES + length
    tensors = sorted((_tensor(*entry, data_begin) for entry in entries.items()), key=lambda t: (t.begin, t.num_bytes))
    _check_places(tensors, data_begin, file_bytes)
    return tuple(tensors)


def _tensor(name: str, entry: object, data_begin: int) -> StoredTensor:
    """Check one entry of the header by itself."""
    called = repr(name[:_NAME_SHOWN])
    fields: Mapping[str, object] = cast("Mapping[str, object]", entry) if isinstance(entry, dict) else {}
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise HeaderError(f"{called} has the type {str(dtype)[:_NAME_SHOWN]!r}, which is not known")
    shape = _sizes(fields.get("shape"))
    if shape is None or len(shape) > MOST_DIMENSIONS:
        raise HeaderError(f"{called} has a shape that cannot be: {str(fields.get('shape'))[:_NAME_SHOWN]}")
    offsets = _sizes(fields.get("data_offsets"))
    if offsets is None or len(offsets) != len(("begin", "end")) or offsets[0] > offsets[1]:
        raise HeaderError(f"{called} has offsets that cannot be: {str(fields.get('data_offsets'))[:_NAME_SHOWN]}")
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if num_bytes != offsets[1] - offsets[0]:
        raise HeaderError(f"{called} needs {num_bytes} bytes, and its offsets are {offsets[1] - offsets[0]} apart")
    return StoredTensor(name, dtype, shape, data_begin + offsets[0], num_bytes)


def _sizes(value: object) -> tuple[int, ...] | None:
    """A list of sizes or offsets; None if it is none."""
    if not isinstance(value, list):
        return None
    sizes: list[int] = []
    for item in cast("list[object]", value):
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= _MOST_SIZE:
            return None
        sizes.append(item)
    return tuple(sizes)


def _check_places(tensors: list[StoredTensor], data_begin: int, file_bytes: int) -> None:
    """The tensors must fill the data from its beginning to the end of the file."""
    end = data_begin
    for tensor in tensors:
        called = repr(tensor.name[:_NAME_SHOWN])
        if tensor.begin < end:
            raise HeaderError(f"{called} shares bytes with the tensor before it")
        if tensor.begin > end:
            raise HeaderError(f"there is a gap of {tensor.begin - end} bytes before {called}")
        end = tensor.begin + tensor.num_bytes
        if end > file_bytes:
            raise HeaderError(f"{called} ends at byte {end}, and the file has {file_bytes}: it was cut short")
    if end != file_bytes:
        raise HeaderError(f"its tensors end at byte {end}, and the file has {file_bytes}")
