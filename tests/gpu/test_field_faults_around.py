"""What went wrong in other engines where keys are stored, blocks copied, kernels launched and tokens drawn.

As `test_field_faults.py`: a test passes on ours and fails with the fault put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from headrace.kernels.attention import Paging
from headrace.kernels.philox import token_words
from headrace.kernels.sample import SampleParameters, gumbel
from tests.support.attention_checks import SPLIT, untouched
from tests.support.mutations import Fault, seen_with
from tests.support.paged_cases import make_case, poisoned_scratch, shared_prefix
from tests.support.rotary_checks import Shape, check_far_slots, check_floats, check_rounded
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what faults make of numbers
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@seen_with("rotary", Fault("rotary", "slot // BLOCK_SIZE", "(slot // BLOCK_SIZE).to(tl.int32)"))
def test_block_offset_beyond_int32_in_the_store(rotary: ModuleType) -> None:
    """As in vLLM (PR 47671), where keys are written."""
    check_far_slots(rotary)


@seen_with(
    "block_copy",
    Fault("block_copy", "tl.program_id(1).to(tl.int64)", "tl.program_id(1)"),
    Fault("block_copy", "dtype=torch.int64", "dtype=torch.int32"),
)
def test_block_offset_beyond_int32_in_copies(block_copy: ModuleType) -> None:
    """As in vLLM (PR 47671), where blocks are copied: beyond word 2³¹ of a plane, and of the cache."""
    words = 4096
    blocks = 2**31 // words + 3
    cache = untouched((1, 2, blocks, 16, 2, 128), torch.float32)
    cache[:, :, blocks - 1], cache[:, :, 0] = 2.0, 1.0
    block_copy.copy_blocks(cache, [(blocks - 1, 1), (0, blocks - 2)])
    for plane in cache[0]:
        assert (plane[1] == 2).all() and (plane[blocks - 2] == 1).all()


@seen_with(
    "rotary",
    Fault("rotary", "column < HEAD_DIM - 2 * HALF", "column < REST_BLOCK"),
    Fault("rotary", "head * HEAD_DIM + BEGIN", "head * 2 * BLOCK + BEGIN"),
)
def test_head_dim_that_is_no_power_of_two_in_the_store(rotary: ModuleType) -> None:
    """Heads of 80, 96 and 192 were refused elsewhere, or stored over their neighbours."""
    for head_dim, rotary_dim in ((80, 20), (96, 96), (192, 64)):
        shape = Shape(head_dim, rotary_dim, 2, 2, "head")
        check_floats(rotary, shape, torch.float32)
        check_rounded(rotary, shape, torch.int8)


@seen_with(
    "rotary decode prefill",
    Fault("rotary", "tl.load(scales_ptr + head, mask=head < KV_HEADS, other=1.0)", "1.0"),
    Fault("rotary", "kv_scales_ptr += KV_HEADS", "kv_scales_ptr += 0"),
    Fault("encode", "KIND == tl.float8e5", "KIND == tl.float8e4nv"),
    Fault("encode", "_float8_e5m2(tl.div_rn(values, by))", "values.to(tl.float8e4nv).to(KIND, bitcast=True)"),
)  # fmt: skip
def test_float8_is_read_as_it_was_written(rotary: ModuleType, decode: ModuleType, prefill: ModuleType) -> None:
    """In vLLM (PR 54341) e4m3 was written and e5m2 read; here what is stored comes back from both kinds of attention.

    One key has all the weight, so the result is its value: of powers of two, which either type holds.
    """
    for cached in FLOAT8:
        caches = torch.zeros(2, 1, 4, 2, 16, dtype=torch.uint8).view(cached)
        scales = torch.tensor([[0.5, 2.0], [4.0, 0.25]])
        values = 2.0 ** torch.arange(-2, 3).repeat(7)[:32].view(1, 2, 16)
        stored = torch.cat((torch.zeros(1, 2, 16), torch.ones(1, 2, 16), values), dim=1).view(1, -1)
        slot = torch.zeros(1, dtype=torch.int64)
        rotary.rotate_and_store(stored, slot, None, *caches, slot, None, scales)
        table = torch.zeros((1, 1), dtype=torch.int32)
        for kernel, queries in ((decode, 1), (prefill, 2)):
            lengths = torch.tensor([queries], dtype=torch.int32)
            case = replace(
                make_case([(queries, queries)], padding=0, cached=cached, heads=2),
                k_cache=caches[0], v_cache=caches[1], kv_scales=scales,
                paging=Paging(table, torch.tensor([0, queries], dtype=torch.int32), lengths),
            )  # fmt: skip
            out, how = case.empty_out(), case.how()
            if queries == 1:
                kernel.decode_attention(case.query, *caches, case.paging, out, how, poisoned_scratch(case, 1, SPLIT))
            else:
                kernel.prefill_attention(case.query, *caches, case.paging, out, how)
            assert_close(out[0], values[0])


@seen_with(
    "ops", Fault("ops", "shape[1] * block_size", "shape[1] * block_size * (600 if len(paging.kv_len) > 11 else 1)")
)
def test_bits_at_batch_12_are_those_at_batch_1(ops: ModuleType) -> None:
    """In vLLM (issue 48076) the number of splits fell from batch 12 on, and with it the bits of a sequence changed."""
    case = make_case([(300, 1)], heads=1, kv_heads=1, padding=0)
    results = []
    for count in (1, 11, 12, 13):
        starts = torch.arange(count + 1, dtype=torch.int32)
        paging = Paging(case.paging.block_table.repeat(count, 1), starts, case.paging.kv_len.repeat(count), 1)
        query = case.query.repeat(count, 1, 1)
        results.append(ops.Attending(90).paged_attention(query, case.k_cache, case.v_cache, paging, 0.25))
    assert_close(results[0], case.reference(case.how())[0])
    for many in results[1:]:
        assert torch.equal(many, results[0].expand(len(many), -1, -1)), len(many)


@contextmanager
def launches() -> Iterator[list[Callable[[], None]]]:
    """What a CUDA graph holds of the kernels that are launched meanwhile: their grids, and their arguments' values."""
    executor: Any = interpreter.GridExecutor
    launch, held = executor.__call__, []

    def hold(self: Any, *args: Any, **options: Any) -> None:
        held.append(lambda: launch(self, *args, **options))
        launch(self, *args, **options)

    executor.__call__ = hold
    try:
        yield held
    finally:
        executor.__call__ = launch


@seen_with(
    "decode prefill",
    Fault("decode", "most = live_splits(how.window, scratch)", "most = -(-int(paging.kv_len.max()) // scratch.split)"),
    Fault("prefill", "[rows * group // tile.rows + num_seqs", "[int(paging.query_start[-1]) * group // tile.rows + 1"),
)  # fmt: skip
def test_splits_frozen_at_capture(decode: ModuleType, prefill: ModuleType) -> None:
    """In sglang (PR 26019) a graph replayed the splits of the lengths that it had been captured with.

    Captured over sequences of one key, replayed over long ones in the same tensors, others with a shared prefix.
    """
    tiles = [((1, 0), 64)]
    case = make_case([(150, 1), (70, 1), (0, 1), (90, 40)], prefixes=tiles, heads=2, kv_heads=1, padding=0)
    case = shared_prefix(case, tiles, 2)
    changing = case.paging.kv_len, case.paging.query_start, case.paging.shared.tile_len, case.paging.shared.own_from
    wanted = [each.clone() for each in changing]
    for tensor, small in zip(changing, ([1, 1, 0, 1], [0, 1, 2, 3, 4], [0, 0], [0, 0, 0, 0]), strict=True):
        tensor.copy_(torch.tensor(small))
    out, scratch = case.empty_out(), poisoned_scratch(case, 3, SPLIT)
    where = case.k_cache, case.v_cache, case.paging, out, case.how()
    with launches() as captured:
        decode.decode_attention(case.query, *where, scratch)
        prefill.prefill_attention(case.query, *where)
    for tensor, now in zip(changing, wanted, strict=True):
        tensor.copy_(now)
    out.fill_(torch.nan)
    for launch in captured:
        launch()
    case.check(out, case.how(), case.rows_of())


def drawing(position: int) -> SampleParameters:
    """A row at temperature 1, seed 0."""
    ones, none = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    return SampleParameters(ones, none.int(), ones, torch.zeros(1), none, none, torch.tensor([position]))


# (position, token) whose words for seed 0 are next to the ends: as a float32, a uniform made of them is 0 or 1
EXTREMES = [(44_076, 575), (5043, 2787), (3016, 345), (23_825, 1639)]


@seen_with(
    "sample",
    Fault("philox", "-_join(k, _log1p(tl.where(k == 0.0, -uniform, m - 1.0)))", "-tl.log(1.0 - uniform)"),
    Fault("philox", "-_join(k, _log1p(tl.where(k == 0.0, -uniform, m - 1.0)))", "-tl.log(uniform)"),
)
def test_a_uniform_of_1_does_not_win_every_race(sample: ModuleType) -> None:
    """In vLLM (PR 43249) a uniform of 1 gave infinite noise, and its token won whatever its score was."""
    for position, token in EXTREMES:
        word = int(token_words(0, 0, position, torch.tensor([token])))
        assert min(word, 0xFFFFFFFF - word) < 64
        scores = torch.full((1, token + 3), -100.0)  # noise is between -3.2 and 22.9
        scores[0, token + 1] = 0.0
        assert sample.sample(scores, drawing(position)).tolist() == [token + 1]
        scores[0, :] = float("-inf")
        scores[0, token] = 0.0
        assert sample.sample(scores, drawing(position)).tolist() == [token]


@seen_with(
    "sample",
    Fault("sample", "blocks = -(-vocab // BLOCK)", "blocks = min(64, -(-vocab // BLOCK))"),
    Fault("philox", "token // 64 * 16 + token % 16, seed", "token % 131072 // 64 * 16 + token % 16, seed"),
)
def test_vocabulary_above_131072(sample: ModuleType) -> None:
    """In RL-Kernel (PR 215) tokens above 131,072 were never drawn, for the last reduction held 64 blocks."""
    tokens = torch.tensor([1000, 131_073, 133_000])
    scores = torch.full((1, 133_001), -90.0)
    scores[0, tokens] = torch.tensor([0.5, 1.0, 1.5])
    best = [int(tokens[(scores[0, tokens] + gumbel(0, 0, position, tokens)).argmax()]) for position in range(20)]
    for token in (131_073, 133_000):
        assert sample.sample(scores, drawing(best.index(token))).tolist() == [token]
