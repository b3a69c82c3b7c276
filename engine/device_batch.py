"""A step's inputs on a device: tensors that stay where they are, into which each step copies what has changed.

    rows of the step   [ sequence 0 | sequence 1 | … | padding ]
    token ids          known to the host, or drawn by the step before: then `source` says where that put it

Padding is token 0 at position 0: it is stored nowhere (slot -1), belongs to no sequence, and so reads no block either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ..kernels.attention import Paging, SharedPrefix
from ..kernels.kv_cache import Placement
from ..kernels.linear import padded_rows
from .batch import BatchLimits, BlockTable
from .device import Device
from .shared_prefix import PrefixGroups
from .types import Plan

UNKNOWN = -1  # of `source`: the host knows the token


@dataclass(frozen=True, slots=True)
class Shape:
    """What a pass over a step depends on, apart from what is in its tensors."""

    num_rows: int  # with padding
    num_seqs: int  # with those that have no row
    longest: int  # rows of a sequence, at the most
    num_tiles: int = 0  # of sequences that share blocks


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """`kernels.forward.Inputs` on the device."""

    num_rows: int
    token_ids: torch.Tensor  # int64 [num_rows]: what the host knows
    source: torch.Tensor  # int64 [num_rows]: places of tokens that were drawn, or UNKNOWN
    positions: torch.Tensor
    placements: tuple[Placement, ...]


@dataclass(slots=True)
class _Rows:
    """What is staged of a step."""

    token_ids: list[int] = field(default_factory=list[int])
    source: list[int] = field(default_factory=list[int])
    positions: list[int] = field(default_factory=list[int])
    starts: list[int] = field(default_factory=lambda: [0])
    ends: list[int] = field(default_factory=list[int])


class DeviceBatch:
    """The tensors, and what fills them. Used by one thread at a time."""

    def __init__(self, limits: BatchLimits, device: Device, max_tiles: int) -> None:
        rows, count = padded_rows(limits.max_tokens, limits.multiple), limits.max_seqs

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device.device)

        self._device = device
        self._limits = limits
        self._tables = [BlockTable(limits, rows, windowed) for windowed in limits.kinds]
        self._each_row = zeros(3 + len(limits.kinds), rows, dtype=torch.int64)  # ids, source, positions, slots …
        self._starts, self._ends = zeros(count + 1, dtype=torch.int32), zeros(count, dtype=torch.int32)
        for table in self._tables:
            table.changes = []
        self._each_row[1:] = UNKNOWN  # and no slot: what is computed before the first step touches nothing
        self._each_row[2] = 0
        self._blocks = [zeros(count, limits.max_blocks, dtype=torch.int32) for _ in limits.kinds]
        self._groups = None
        self._max_tiles = max_tiles
        if limits.sharing is not None:
            self._groups = PrefixGroups(limits.sharing, limits.block_size, torch.device("cpu"))
            per_tile = limits.sharing.per_tile
            self._shared = SharedPrefix(
                zeros(max_tiles, per_tile, dtype=torch.int32),
                zeros(max_tiles, dtype=torch.int32),
                zeros(count, dtype=torch.int32),
            )

    def shared_by(self, plan: Plan) -> SharedPrefix | None:
        """What a plan's sequences share, on the host; None where there is nothing, or more than there is room for."""
        found = None if self._groups is None else self._groups.find(plan.rows)
        return found if found is not None and len(found.tile_len) <= self._max_tiles else None

    def put(self, plan: Plan, shape: Shape, drawn: Mapping[int, int], shared: SharedPrefix | None) -> None:
        """Copy a step's inputs into the tensors.

        drawn   of a sequence's serial: where the step before puts its token
        shared  as `shared_by` gave it, if the shape has tiles

        Raises ValueError where a sequence lacks a block for a token to be computed.
        """
        rows = _rows_of(plan, drawn)
        missing = shape.num_rows - len(rows.token_ids)
        for table in self._tables:
            table.fill(plan.rows, shape.num_rows)
        staged = np.array(
            [
                rows.token_ids + [0] * missing,
                rows.source + [UNKNOWN] * missing,
                rows.positions + [0] * missing,
                *(table.slots[: shape.num_rows] for table in self._tables),
            ],
            np.int64,
        )
        for number, values in enumerate(staged):
            self._copy(self._each_row[number, : shape.num_rows], values)
        behind = shape.num_seqs - len(plan.rows)
        self._copy(self._starts[: shape.num_seqs + 1], np.array(rows.starts + [rows.starts[-1]] * behind, np.int32))
        self._copy(self._ends[: shape.num_seqs], np.array(rows.ends + [0] * behind, np.int32))
        for table, blocks in zip(self._tables, self._blocks, strict=True):
            self._update(blocks, table)
        if shared is not None:
            self._share(shared, shape)

    def inputs(self, shape: Shape) -> DeviceInputs:
        """Views of the tensors for steps of a shape."""
        token_ids, source, positions, *slots = self._each_row[:, : shape.num_rows]
        lengths = self._starts[: shape.num_seqs + 1], self._ends[: shape.num_seqs]
        shared = None
        if shape.num_tiles:
            tiles = self._shared.seqs[: shape.num_tiles], self._shared.tile_len[: shape.num_tiles]
            shared = SharedPrefix(*tiles, self._shared.own_from[: shape.num_seqs])
        placements = tuple(
            Placement(own, Paging(blocks[: shape.num_seqs], *lengths, shape.longest, None if windowed else shared))
            for own, blocks, windowed in zip(slots, self._blocks, self._limits.kinds, strict=True)
        )
        return DeviceInputs(shape.num_rows, token_ids, source, positions, placements)

    def _copy(self, target: torch.Tensor, values: np.ndarray) -> None:  # type: ignore[type-arg]
        staged = self._device.pinned(*target.shape, dtype=target.dtype)
        staged.copy_(torch.as_tensor(values))
        self._device.copy(target, staged)

    def _update(self, blocks: torch.Tensor, table: BlockTable) -> None:
        """Move the entries of a block table that have changed."""
        if not table.changes:
            return
        width = blocks.shape[1]
        at = np.concatenate([np.arange(len(ids)) + row * width + first for row, first, ids in table.changes])
        ids = np.concatenate([np.asarray(ids, np.int64) for _, _, ids in table.changes])
        moved = torch.empty((2, len(at)), dtype=torch.int64, device=self._device.device)
        self._copy(moved, np.stack((at, ids)))
        flat = blocks.view(-1)
        self._device.put(lambda: _scatter(flat, moved))
        table.changes.clear()

    def _share(self, shared: SharedPrefix, shape: Shape) -> None:
        tiles, count = len(shared.tile_len), len(shared.own_from)
        self._copy(self._shared.seqs[:tiles], shared.seqs.numpy())
        lengths = np.zeros(shape.num_tiles, np.int32)  # a tile of no length is nobody's
        lengths[:tiles] = shared.tile_len.numpy()
        self._copy(self._shared.tile_len[: shape.num_tiles], lengths)
        self._copy(self._shared.own_from[:count], shared.own_from.numpy())


def _scatter(flat: torch.Tensor, moved: torch.Tensor) -> None:
    flat.index_copy_(0, moved[0], moved[1].int())


def _rows_of(plan: Plan, drawn: Mapping[int, int]) -> _Rows:
    rows = _Rows()
    for sequence, start, num_tokens, _ in plan.rows:
        end, known = start + num_tokens, len(sequence.token_ids)
        if num_tokens > 1:  # the others are most; a loop over few numbers is quicker than slices
            rows.token_ids += sequence.token_ids[start : end - 1]
            rows.source += [UNKNOWN] * (num_tokens - 1)
            rows.positions += range(start, end - 1)
        rows.token_ids.append(0 if end > known else sequence.token_ids[end - 1])
        rows.source.append(drawn[sequence.serial] if end > known else UNKNOWN)
        rows.positions.append(end - 1)
        rows.starts.append(len(rows.token_ids))
        rows.ends.append(end)
    return rows
