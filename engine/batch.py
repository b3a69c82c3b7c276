"""Turns a plan into the tensors of one step.

    rows of the step   [ sequence 0 | sequence 1 | … | padding ]
                       query_start[0] ↑            ↑ num_tokens  ↑ num_rows

Padding repeats token 0 at position 0 and writes nowhere (slot -1); it exists because a product gives each row the
same bits only from some number of rows on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..kernels.attention import Paging
from ..kernels.linear import padded_rows
from .sequence import Sequence
from .types import Plan

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs, all on the runner's device. Views of the builder's buffers: valid until its next `build`."""

    num_tokens: int  # rows that are tokens of sequences
    num_rows: int  # with padding
    token_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int64 [num_rows], in its sequence
    slots: torch.Tensor  # int64 [num_rows]: block · block_size + offset, or -1
    last_rows: np.ndarray[Any, np.dtype[np.int64]]  # [sequences], on the CPU: each one's last row
    paging: Paging


class BatchBuilder:
    """Builds batches in buffers that are allocated once.

    max_tokens and max_seqs bound a plan, max_blocks the blocks of one sequence; `windowed` takes its window blocks. A
    row of the block table that still holds the blocks of the same sequence is only added to: in a steady decode nothing
    of the table moves.
    """

    def __init__(
        self,
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
        block_size: int,
        multiple: int,
        device: torch.device,
        *,
        windowed: bool = False,
    ) -> None:
        self.block_size = block_size
        self._windowed = windowed
        self.multiple = multiple
        rows = padded_rows(max_tokens, multiple)
        self._token_ids, self._positions, self._slots = (np.zeros(rows, np.int64) for _ in range(3))
        self._table = np.zeros((max_seqs, max_blocks), np.int32)
        self._held: list[tuple[int, int]] = [(-1, -1)] * max_seqs  # whose blocks a row holds: serial and epoch
        self._num_held = [0] * max_seqs  # how many of them
        self._start, self._kv_len = np.zeros(max_seqs + 1, np.int32), np.zeros(max_seqs, np.int32)
        buffers = (self._token_ids, self._positions, self._slots, self._table, self._start, self._kv_len)
        self._views = _Views(device, buffers)

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
        slots: list[int] = []
        starts, ends = [0], list[int]()
        for number, (sequence, start, num_tokens, _) in enumerate(plan.rows):
            end = start + num_tokens
            block_ids = sequence.window_ids if self._windowed else sequence.block_ids
            self._hold(number, sequence, block_ids, -(-end // self.block_size))
            if num_tokens == 1:  # most of them; a loop over few numbers is quicker than numpy
                token_ids.append(sequence.token_ids[start])
                positions.append(start)
                slots.append(self._slot(block_ids, start))
            else:
                token_ids += sequence.token_ids[start:end]
                positions += range(start, end)
                slots += self._slots_of(block_ids, start, end)
            starts.append(len(token_ids))
            ends.append(end)
        rows = padded_rows(total, self.multiple)
        padding = [0] * (rows - total)
        self._token_ids[:rows] = token_ids + padding
        self._positions[:rows] = positions + padding
        self._slots[:rows] = slots + [NOWHERE] * (rows - total)
        self._start[: count + 1] = starts
        self._kv_len[:count] = ends
        return self._batch(count, total, rows)

    def _slot(self, block_ids: list[int], position: int) -> int:
        """Where the key and the value of a position go."""
        size = self.block_size
        return block_ids[position // size] * size + position % size

    def _slots_of(self, block_ids: list[int], start: int, end: int) -> list[int]:
        size, first = self.block_size, start // self.block_size
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
        if held < num_blocks:
            blocks = block_ids[held:num_blocks]
            if len(blocks) < num_blocks - held:
                self._held[number] = (-1, -1)
                raise ValueError(f"{sequence.request_id} has {len(block_ids)} blocks, too few for {num_blocks}")
            self._table[number, held:num_blocks] = blocks
            self._num_held[number] = num_blocks

    def _batch(self, count: int, total: int, rows: int) -> Batch:
        token_ids, positions, slots = self._views.of_rows(rows)
        return Batch(
            num_tokens=total,
            num_rows=rows,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            last_rows=self._start[1 : count + 1].astype(np.int64) - 1,
            paging=self._views.of_sequences(count),
        )


class _Views:
    """The builder's buffers on the device. On the CPU that is where they are; the newest parts are kept as tensors."""

    def __init__(self, device: torch.device, buffers: tuple[np.ndarray[Any, np.dtype[Any]], ...]) -> None:
        self._device = device
        token_ids, positions, slots, self._table, self._start, self._kv_len = map(torch.as_tensor, buffers)
        self._each_row = (token_ids, positions, slots)
        self._keeps = device.type == "cpu"
        self._rows: tuple[int, tuple[torch.Tensor, ...]] = (-1, ())
        self._sequences = (-1, Paging(self._table, self._start, self._kv_len))

    def of_rows(self, count: int) -> tuple[torch.Tensor, ...]:
        """The first `count` token ids, positions and slots."""
        if self._rows[0] != count:
            found = tuple(each[:count].to(self._device) for each in self._each_row)
            self._rows = (count if self._keeps else -1, found)
        return self._rows[1]

    def of_sequences(self, count: int) -> Paging:
        """What is known of the first `count` sequences."""
        if self._sequences[0] != count:
            parts = (self._table[:count], self._start[: count + 1], self._kv_len[:count])
            found = Paging(*(part.to(self._device) for part in parts))
            self._sequences = (count if self._keeps else -1, found)
        return self._sequences[1]
