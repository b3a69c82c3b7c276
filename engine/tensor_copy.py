"""Copies tensors out of safetensors files to where they are computed with, converting their type on the way.

Files are read through a small buffer instead of being mapped: pages of a mapped file count as the process's memory
until they are let go.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from .mxfp4 import GROUP_BYTES, dequantised
from .safetensors_header import StoredTensor

BUFFER_BYTES = 8 << 20
GROUPS_AT_ONCE = 1 << 13  # of weights in 4 bits: 1 MiB of values, which stays in the second cache
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # what weights may be stored in
PACKED = "U8"  # what those in 4 bits, and their scales, are stored in


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of a checkpoint is to lie."""

    view: torch.Tensor  # its values in the order in which they are stored, in as many dimensions as that takes
    shape: tuple[int, ...]  # as stored
    transposed: bool = False  # the view has the last two dimensions of the stored shape the other way round
    scales: str = ""  # of weights in 4 bits, see `mxfp4`: the name of their scales' tensor


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor in an open file."""

    path: Path
    file: BinaryIO
    tensor: StoredTensor


def copy(source: Source, target: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy a tensor into one of as many values, by way of `buffer` unless its bytes can go straight to their place.

    Raises OSError where the file ends before.
    """
    file, tensor = source.file, source.tensor
    if target.numel() == 0:
        return
    file.seek(tensor.begin)
    dtype = DTYPES[tensor.dtype]
    in_one_piece = target.is_contiguous()
    if in_one_piece and target.dtype == dtype and target.device.type == "cpu":
        _read_into(file, target.view(-1).view(torch.uint8))
        return
    rows = target.view(-1) if in_one_piece else target
    row_bytes = tensor.num_bytes // len(rows)
    if row_bytes > len(buffer):
        buffer = torch.empty(row_bytes, dtype=torch.uint8)
    step = len(buffer) // row_bytes
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        stored = buffer[: len(part) * row_bytes]
        _read_into(file, stored)
        part.copy_(stored.view(dtype).view(part.shape))


def copy_transposed(source: Source, target: torch.Tensor) -> None:
    """Copy a tensor [experts, inputs, outputs] into one of as many values, [experts, outputs…, inputs].

    torch transposes fast only a whole tensor into another of its type. Raises OSError as `copy` does.
    """
    count, inputs, outputs = source.tensor.shape
    dtype = DTYPES[source.tensor.dtype]
    stored = torch.empty(source.tensor.num_bytes // count, dtype=torch.uint8)
    turned = torch.empty((outputs, inputs), dtype=dtype)
    source.file.seek(source.tensor.begin)
    for expert in target:
        _read_into(source.file, stored)
        turned.copy_(stored.view(dtype).view(inputs, outputs).t())
        expert.copy_(turned.view(expert.shape))


def copy_groups(packed: Source, scales: Source, target: torch.Tensor) -> None:
    """Copy weights in 4 bits into a tensor of as many values, [experts, rows, …]. Raises OSError as `copy` does."""
    groups_of_row = scales.tensor.num_bytes // (target.shape[0] * target.shape[1])
    step = max(1, GROUPS_AT_ONCE // groups_of_row)
    group = 0  # the next one
    for expert in target:
        for start in range(0, len(expert), step):
            part = expert[start : start + step]
            count = len(part) * groups_of_row
            stored = [torch.empty(count * size, dtype=torch.uint8) for size in (GROUP_BYTES, 1)]
            for source, each, size in zip((packed, scales), stored, (GROUP_BYTES, 1), strict=True):
                source.file.seek(source.tensor.begin + group * size)
                _read_into(source.file, each)
            part.copy_(dequantised(stored[0].view(count, GROUP_BYTES), stored[1]).view(part.shape))
            group += count


def _read_into(file: BinaryIO, target: torch.Tensor) -> None:
    """Fill `target`, uint8 on the CPU, with the next bytes. Raises OSError where the file ends before."""
    memory = target.numpy().data
    while memory:
        count = file.readinto(memory)  # pyright: ignore
        if not count:
            raise OSError("it is shorter than its header says")
        memory = memory[count:]
