"""Turns a plan into the tensors of one step.

    rows of the step   [ sequence 0 | sequence 1 | … | padding ]
                       query_start[0] ↑            ↑ num_tokens  ↑ num_rows

Padding repeats token 0 at position 0 and writes nowhere (slot -1); it exists because a product gives each row the
same bits only from some number of rows on.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..kernels.attention import Paging, SharedPrefix
from ..kernels.kv_cache import Placement
from ..kernels.linear import padded_rows
from .sequence import Sequence
from .shared_prefix import PrefixGroups, Sharing
from .types import Plan, ScheduledRow

Integers = np.ndarray[Any, np.dtype[Any]]
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs, all on the runner's device. Views of the builder's buffers: valid until its next `build`."""

    num_tokens: int  # rows that are tokens of sequences
    num_rows: int  # with padding
    token_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int64 [num_rows], in its sequence
    last_rows: Integers  # [sequences], on the CPU: each one's last row
    placements: tuple[Placement, ...]  # in each group of layers

    @property
    def query_start(self) -> torch.Tensor:
        """As `Paging` has it."""
        return self.placements[0].paging.query_start


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What buffers are made for."""

    max_tokens: int  # of a step
    max_seqs: int
    max_blocks: int  # of a sequence
    block_size: int
    multiple: int  # what rows are padded to
    kinds: tuple[bool, ...] = (False,)  # of each group of layers, whether it takes a sequence's window blocks
    sharing: Sharing | None = None  # None: whoever attends makes nothing of shared blocks


class BatchBuilder:
    """Builds batches in buffers that are allocated once."""

    def __init__(self, limits: BatchLimits, device: torch.device) -> None:
        self.block_size = limits.block_size
        self.multiple = limits.multiple
        rows = padded_rows(limits.max_tokens, limits.multiple)
        self._token_ids, self._positions = (np.zeros(rows, np.int64) for _ in range(2))
        self._tables = [BlockTable(limits, rows, windowed) for windowed in limits.kinds]
        self._start, self._kv_len = np.zeros(limits.max_seqs + 1, np.int32), np.zeros(limits.max_seqs, np.int32)
        self._groups = None if limits.sharing is None else PrefixGroups(limits.sharing, limits.block_size, device)
        each_row, lengths = (self._token_ids, self._positions), (self._start, self._kv_len)
        self._views = _Views(device, each_row, lengths, self._tables)

    def build(self, plan: Plan) -> Batch:
        """Fill the buffers from the plan's sequences, which are only read.

        Raises:
            ValueError: the plan is larger than the buffers, or a sequence lacks a block for a token to be computed.
        """
        total, count = plan.num_tokens, len(plan.rows)
        if total > len(self._token_ids) or count > len(self._kv_len):
            raise ValueError(
                f"a step of {total} tokens in {count} sequences exceeds the {len(self._token_ids)} tokens in "
                f"{len(self._kv_len)} sequences that were planned for"
            )
        token_ids: list[int] = []
        positions: list[int] = []
        starts, ends, longest = [0], list[int](), 1
        for sequence, start, num_tokens, _ in plan.rows:
            end = start + num_tokens
            if num_tokens == 1:  # most of them; a loop over few numbers is quicker than numpy
                token_ids.append(sequence.token_ids[start])
                positions.append(start)
            else:
                token_ids += sequence.token_ids[start:end]
                positions += range(start, end)
                longest = max(longest, num_tokens)
            starts.append(len(token_ids))
            ends.append(end)
        rows = padded_rows(total, self.multiple)
        padding = [0] * (rows - total)
        self._token_ids[:rows] = token_ids + padding
        self._positions[:rows] = positions + padding
        for table in self._tables:
            table.fill(plan.rows, rows)
        self._start[: count + 1] = starts
        self._kv_len[:count] = ends
        shared = None if self._groups is None else self._groups.find(plan.rows)
        return self._batch(count, total, rows, self._views.of_sequences(count, longest, shared))

    def _batch(self, count: int, total: int, rows: int, pagings: List[Paging]) -> Batch:
        token_ids, positions, slots = self._views.of_rows(rows)
        return Batch(
            num_tokens=total,
            num_rows=rows,
            token_ids=token_ids,
            positions=positions,
            last_rows=self._start[1 : count + 1].astype(np.int64) - 1,
            placements=tuple(map(Placement, slots, pagings)),
        )


class BlockTable:
    """Block table and slots of one group of layers.

    A row of the table that still holds the blocks of the same sequence is only added to: in a steady decode nothing of
    it moves. Whoever wants to know what does sets `changes` to a list: it gets (row, first column, block ids).
    """

    def __init__(self, limits: BatchLimits, rows: int, windowed: bool) -> None:
        self.slots = np.zeros(rows, np.int64)
        self.blocks = np.zeros((limits.max_seqs, limits.max_blocks), np.int32)
        self._size = limits.block_size
        self.windowed = windowed
        self._held: list[tuple[int, int]] = [(-1, -1)] * limits.max_seqs  # whose blocks: serial and epoch
        self._num_held = [0] * limits.max_seqs  # how many of them
        self.changes: list[tuple[int, int, list[int]]] | None = None

    def fill(self, planned: List[ScheduledRow], num_rows: int) -> None:
        """Put in the blocks of the plan's sequences and the slots of their rows, padded."""
        size = self._size
        slots: list[int] = []
        for number, (sequence, start, num_tokens, _) in enumerate(planned):
            block_ids = sequence.window_ids if self.windowed else sequence.block_ids
            end = start + num_tokens
            num_blocks = -(-end // size)
            if self._num_held[number] < num_blocks or self._held[number] != (sequence.serial, sequence.epoch):
                self._hold(number, sequence, block_ids, num_blocks)
            if num_tokens == 1:
                slots.append(block_ids[start // size] * size + start % size)
            else:
                slots += self._slots_of(block_ids, start, end)
        slots += [NOWHERE] * (num_rows - len(slots))
        self.slots[:num_rows] = slots

    def _slots_of(self, block_ids: list[int], start: int, end: int) -> list[int]:
        size, first = self._size, start // self._size
        blocks = np.asarray(block_ids[first : -(-end // size)], np.int64)
        slots = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        found: list[int] = slots[start - first * size : end - first * size].tolist()
        return found

    def _hold(self, number: int, sequence: Sequence, block_ids: list[int], num_blocks: int) -> None:
        """Have a row of the table hold at least the first `num_blocks` blocks of a sequence."""
        held = self._num_held[number]
        key = (sequence.serial, sequence.epoch)
        if self._held[number] != key:
            self._held[number], held = key, 0
        blocks = block_ids[held:num_blocks]
        if len(blocks) < num_blocks - held:
            self._held[number] = (-1, -1)
            raise ValueError(f"{sequence.request_id} has {len(block_ids)} blocks, too few for {num_blocks}")
        self.blocks[number, held:num_blocks] = blocks
        if self.changes is not None:
            self.changes.append((number, held, blocks))
        self._num_held[number] = num_blocks


class _Views:
    """The builder's buffers on the device. On the CPU that is where they are; the newest parts are kept as tensors."""

    def __init__(
        self,
        device: torch.device,
        each_row: tuple[Integers, ...],
        lengths: tuple[Integers, ...],
        tables: list[BlockTable],
    ) -> None:
        self._device = device
        self._each_row = [torch.as_tensor(part) for part in (*each_row, *(table.slots for table in tables))]
        self._lengths = [torch.as_tensor(part) for part in lengths]
        self._blocks = [(torch.as_tensor(table.blocks), table.windowed) for table in tables]
        self._keeps = device.type == "cpu"
        self._rows: tuple[int, list[torch.Tensor]] = (-1, [])
        self._sequences: tuple[tuple[int, int], SharedPrefix | None, list[Paging]] = ((-1, -1), None, [])

    def of_rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """The first `count` token ids and positions, and slots in each group."""
        if self._rows[0] != count:
            found = [each[:count].to(self._device) for each in self._each_row]
            self._rows = (count if self._keeps else -1, found)
        token_ids, positions, *slots = self._rows[1]
        return token_ids, positions, slots

    def of_sequences(self, count: int, longest: int, shared: SharedPrefix | None) -> list[Paging]:
        """What is known of the first `count` sequences, in each group; of their rows, and of what they share."""
        key = (count, longest)
        if self._sequences[0] != key or self._sequences[1] is not shared:
            start, kv_len = self._lengths
            lengths = start[: count + 1].to(self._device), kv_len[:count].to(self._device)
            found = [
                Paging(blocks[:count].to(self._device), *lengths, longest, None if windowed else shared)
                for blocks, windowed in self._blocks
            ]
            self._sequences = (key if self._keeps else (-1, -1), shared, found)
        return self._sequences[2]
