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

    max_tokens and max_seqs bound a plan, max_blocks the blocks of one sequence.
    """

    def __init__(
        self, max_tokens: int, max_seqs: int, max_blocks: int, block_size: int, multiple: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.multiple = multiple
        self.device = device
        rows = padded_rows(max_tokens, multiple)
        self._token_ids, self._positions, self._slots = (np.zeros(rows, np.int64) for _ in range(3))
        self._table = np.zeros((max_seqs, max_blocks), np.int32)
        self._start, self._kv_len = np.zeros(max_seqs + 1, np.int32), np.zeros(max_seqs, np.int32)

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
        at = 0
        for number, row in enumerate(plan.rows):
            end = row.start + row.num_tokens
            blocks = row.sequence.block_ids[: -(-end // self.block_size)]
            if len(blocks) * self.block_size < end:
                raise ValueError(f"{row.sequence.request_id} has {len(blocks)} blocks, too few for {end} tokens")
            self._table[number, : len(blocks)] = blocks
            self._start[number], self._kv_len[number] = at, end
            self._token_ids[at : at + row.num_tokens] = row.sequence.token_ids[row.start : end]
            self._positions[at : at + row.num_tokens] = np.arange(row.start, end)
            at += row.num_tokens
        self._start[count] = total
        rows = padded_rows(total, self.multiple)
        self._token_ids[total:rows] = 0
        self._positions[total:rows] = 0
        self._fill_slots(count, total, rows)
        return self._batch(count, total, rows)

    def _fill_slots(self, count: int, total: int, rows: int) -> None:
        """Look up where each token's key and value go."""
        lengths = np.diff(self._start[: count + 1])
        sequence = np.repeat(np.arange(count), lengths)
        position = self._positions[:total]
        block = self._table[sequence, position // self.block_size].astype(np.int64)
        self._slots[:total] = block * self.block_size + position % self.block_size
        self._slots[total:rows] = NOWHERE

    def _batch(self, count: int, total: int, rows: int) -> Batch:
        width = max(1, -(-int(self._kv_len[:count].max()) // self.block_size))

        def tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.int64 | np.int32]]) -> torch.Tensor:
            return torch.as_tensor(values, device=self.device)  # no copy on the CPU

        return Batch(
            num_tokens=total,
            num_rows=rows,
            token_ids=tensor(self._token_ids[:rows]),
            positions=tensor(self._positions[:rows]),
            slots=tensor(self._slots[:rows]),
            last_rows=self._start[1 : count + 1].astype(np.int64) - 1,
            paging=Paging(
                block_table=tensor(np.ascontiguousarray(self._table[:count, :width])),
                query_start=tensor(self._start[: count + 1]),
                kv_len=tensor(self._kv_len[:count]),
            ),
        )
