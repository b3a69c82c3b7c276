"""The parts of the decoder: rotary tables against transformers', batches against a plain computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.engine.batch import Batch, BatchBuilder, BatchLimits
from headrace.engine.intake import Limits, sequences_of
from headrace.engine.models.rotary import rotary_table
from headrace.engine.prefix_cache import HOLE
from headrace.engine.rope import RopeConfig
from headrace.engine.sequence import Sequence
from headrace.engine.types import Plan, Request, ScheduledRow

CPU = torch.device("cpu")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig("default", 500_000.0),
        RopeConfig("linear", 10_000.0, 4.0),
        RopeConfig("llama3", 500_000.0, 8.0, 1.0, 4.0, 8192),
        RopeConfig("llama3", 500_000.0, 32.0, 1.0, 4.0, 8192),
    ],
)
def test_rotary_tables_are_those_of_transformers(rope: RopeConfig, head_dim: int) -> None:
    parameters = {
        "rope_type": rope.kind, "rope_theta": rope.theta, "factor": rope.factor, "low_freq_factor":
        rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor, "original_max_position_embeddings":
        rope.original_max_position,
    }  # fmt: skip
    kept = {"default": 2, "linear": 3, "llama3": 6}[rope.kind]
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=20_000,
        rope_parameters=dict(list(parameters.items())[:kept]),
    )  # fmt: skip
    positions = torch.arange(20_000)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions.unsqueeze(0))
    table = rotary_table(rope, head_dim, 20_000)
    half = head_dim // 2
    # an angle of up to 20,000 is known to 2⁻²⁴ of itself; where the frequencies are blended, angles are small
    assert (table[:, :half] - cos[0, :, :half]).abs().max() < 1e-4
    assert (table[:, half:] - sin[0, :, half:]).abs().max() < 1e-4


def sequence(length: int, blocks: list[int]) -> Sequence:
    request = Request(f"of {length}", tuple(range(100, 100 + length)))
    made = sequences_of(request, Limits(1000, frozenset(), 500, 500, 4), 0)[0]
    made.block_ids = blocks
    return made


def builder(multiple: int = 4) -> BatchBuilder:
    return BatchBuilder(BatchLimits(max_tokens=16, max_seqs=3, max_blocks=8, block_size=4, multiple=multiple), CPU)


ROWS = (
    ScheduledRow(sequence(9, [7, 2, 5]), 8, 1, True),
    ScheduledRow(sequence(14, [1, 9, 3, 4, 11]), 3, 6, False),  # the last blocks are not needed yet
)


def test_a_batch_says_where_everything_is() -> None:
    batch = builder().build(Plan(1, ROWS))
    assert (batch.num_tokens, batch.num_rows) == (7, 8)
    assert batch.token_ids.tolist() == [108, 103, 104, 105, 106, 107, 108, 0]
    assert batch.positions.tolist() == [8, 3, 4, 5, 6, 7, 8, 0]
    ((slots, paging),) = batch.placements
    assert slots.tolist() == [20, 7, 36, 37, 38, 39, 12, -1]
    assert paging.block_table[0].tolist()[:3] == [7, 2, 5]
    assert paging.block_table[1].tolist()[:3] == [1, 9, 3]
    assert (paging.query_start.tolist(), paging.kv_len.tolist()) == ([0, 1, 7], [9, 9])


def test_each_group_of_layers_has_its_own_blocks_and_slots() -> None:
    made = BatchBuilder(BatchLimits(16, 3, 8, 4, 4, kinds=(False, True)), CPU)
    one, other = sequence(9, [7, 2, 5]), sequence(9, [1, 9, 3])
    one.window_ids, other.window_ids = [HOLE, 4, 6], [8, 0]
    first = made.build(Plan(1, (ScheduledRow(one, 8, 1, True), ScheduledRow(other, 3, 5, False))))
    assert [slots.tolist() for slots, _ in first.placements] == [
        [20, 7, 36, 37, 38, 39, -1, -1],
        [24, 35, 0, 1, 2, 3, -1, -1],
    ]
    assert [paging.block_table[0, :3].tolist() for _, paging in first.placements] == [[7, 2, 5], [HOLE, 4, 6]]
    other.window_ids = [HOLE, 0, 5]  # a block was let go, which needs no new epoch, and another came
    second = made.build(Plan(2, (ScheduledRow(one, 8, 1, True), ScheduledRow(other, 8, 1, True))))
    assert [slots.tolist() for slots, _ in second.placements] == [[20, 12, -1, -1], [24, 20, -1, -1]]
    assert second.placements[1].paging.block_table[1, 1:3].tolist() == [0, 5]


def test_a_later_batch_holds_nothing_of_an_earlier_one() -> None:
    reused = builder()
    reused.build(Plan(1, ROWS))
    plan = Plan(2, (ScheduledRow(sequence(2, [6]), 1, 1, True),))
    again, fresh = reused.build(plan), builder().build(plan)
    for name in ("token_ids", "positions"):
        assert torch.equal(getattr(again, name), getattr(fresh, name)), name
    assert torch.equal(again.placements[0].slots, fresh.placements[0].slots)
    for name in ("query_start", "kv_len"):
        assert torch.equal(getattr(again.placements[0].paging, name), getattr(fresh.placements[0].paging, name)), name
    assert again.placements[0].paging.block_table[0, 0] == 6


def test_a_row_of_the_table_follows_whoever_takes_it() -> None:
    reused = builder()
    one, other = sequence(9, [7, 2, 5]), sequence(9, [1, 9, 3])

    def table(*rows: ScheduledRow) -> list[list[int]]:
        batch = reused.build(Plan(1, rows))
        assert batch.placements[0].slots.tolist() == builder().build(Plan(1, rows)).placements[0].slots.tolist()
        return [row[: -(-length // 4)].tolist() for row, length in zip(*paging_of(batch), strict=True)]

    def paging_of(batch: Batch) -> tuple[np.ndarray, list[int]]:
        return batch.placements[0].paging.block_table.numpy(), batch.placements[0].paging.kv_len.tolist()

    assert table(ScheduledRow(one, 0, 3, False), ScheduledRow(other, 0, 5, False)) == [[7], [1, 9]]
    assert table(ScheduledRow(one, 3, 6, True)) == [[7, 2, 5]]  # it has grown
    assert table(ScheduledRow(other, 5, 4, True)) == [[1, 9, 3]]  # another takes the row
    one.block_ids[1], one.epoch = 8, 1  # a block was replaced
    assert table(ScheduledRow(other, 8, 1, True), ScheduledRow(one, 8, 1, True)) == [[1, 9, 3], [7, 8, 5]]
    other.block_ids[0] = 6  # without a new epoch: nobody does this, and nothing is copied again
    assert table(ScheduledRow(other, 8, 1, True)) == [[1, 9, 3]]


def test_after_a_refused_plan_a_row_is_read_anew() -> None:
    reused, one = builder(), sequence(9, [7, 2])
    with pytest.raises(ValueError, match="too few"):
        reused.build(Plan(1, (ScheduledRow(one, 8, 1, True),)))
    one.block_ids = [7, 4, 5]
    batch = reused.build(Plan(2, (ScheduledRow(one, 8, 1, True),)))
    assert batch.placements[0].paging.block_table[0, :3].tolist() == [7, 4, 5]


def test_rows_are_padded_to_the_multiple() -> None:
    assert [builder(m).build(Plan(1, ROWS)).num_rows for m in (1, 4, 16)] == [7, 8, 16]


def test_a_plan_beyond_the_buffers_is_refused() -> None:
    with pytest.raises(ValueError, match="20 tokens"):
        builder().build(Plan(1, (ScheduledRow(sequence(20, list(range(5))), 0, 20, True),)))
    many = tuple(ScheduledRow(sequence(1, [n]), 0, 1, True) for n in range(4))
    with pytest.raises(ValueError, match="4 sequences"):
        builder().build(Plan(1, many))


def test_a_sequence_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks, too few for 3"):
        builder().build(Plan(1, (ScheduledRow(sequence(9, [7, 2]), 8, 1, True),)))


def test_building_changes_nothing_of_the_sequence() -> None:
    row = ROWS[1]
    before = list(row.sequence.token_ids), list(row.sequence.block_ids)
    batch = builder().build(Plan(1, ROWS))
    batch.token_ids.fill_(-5)
    assert (row.sequence.token_ids, row.sequence.block_ids) == before
    assert np.all(batch.token_ids.numpy() == -5)
