"""Paged attention against dense float64 attention, and that a query's bits depend on its own sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from headrace.kernels.attention import Paging
from headrace.kernels.backend import Backend
from headrace.kernels.kv_layout import cached_width, decode, encode, laid_out, poison
from tests.support.tolerances import assert_close

NOBODY = 2**30  # a block id that no cache has: reading it is a crash


@dataclass
class Case:
    """A batch over a cache in which every slot that nobody may read holds NaN."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    kv_len: torch.Tensor
    keys: list[torch.Tensor]  # per sequence float32 [kv_len, kv_heads, head_dim]
    values: list[torch.Tensor]

    def run(
        self,
        ops: Backend,
        scale: float = 0.25,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        paging = Paging(self.block_table, self.query_start, self.kv_len)
        return attend(ops, self.query, (self.k_cache, self.v_cache), paging, scale, window, soft_cap, sinks)


def attend(
    ops: Backend, query: torch.Tensor, caches: Sequence[torch.Tensor], paging: Paging, scale: float = 0.25,
    window: int = 0, soft_cap: float = 0.0, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention over by_position caches, brought into the backend's layout."""
    keys, values = (laid_out(cache, ops.kv_layout, keys=number == 0) for number, cache in enumerate(caches))
    return ops.paged_attention(query, keys, values, paging, scale, window, soft_cap, sinks)


def make_case(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    padding: int = 3,
    seed: int = 0,
) -> Case:
    """lengths: (keys, queries) of each sequence."""
    random = torch.Generator().manual_seed(seed)
    widths = [-(-keys // block_size) for keys, _ in lengths]
    total = sum(widths)
    order = torch.randperm(total + 2, generator=random)[:total].tolist()
    shape = (2, total + 2, block_size, kv_heads, cached_width(head_dim, dtype))
    caches = torch.empty(shape, dtype=dtype)
    poison(caches[None], range(total + 2))
    table = torch.full((len(lengths), max(widths) + 2), NOBODY, dtype=torch.int32)
    dense: list[list[torch.Tensor]] = [[], []]
    for s, (keys, queries) in enumerate(lengths):
        first = max(0, keys - queries - window + 1) if window else 0  # nobody sees what lies before
        for block in range(first // block_size, widths[s]):
            table[s, block] = order.pop()
        for cache, rows in zip(caches, dense, strict=True):
            data = encode(torch.randn((keys, kv_heads, head_dim), generator=random), dtype)
            rows.append(decode(data))
            for position in range(first, keys):
                cache[table[s, position // block_size], position % block_size] = data[position]
    starts = torch.tensor([0, *(queries for _, queries in lengths)]).cumsum(0).int()
    query = torch.randn((int(starts[-1]) + padding, heads, head_dim), generator=random).to(
        torch.float32 if dtype == torch.int8 else dtype
    )
    kv_len = torch.tensor([keys for keys, _ in lengths], dtype=torch.int32)
    return Case(query, *caches, table, starts, kv_len, *dense)


def dense_attention(
    case: Case, scale: float = 0.25, window: int = 0, soft_cap: float = 0.0, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition, in float64, one query at a time."""
    out = torch.zeros(case.query.shape, dtype=torch.float64)
    heads, kv_heads = case.query.shape[1], case.k_cache.shape[2]
    for s, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        begin, end = int(case.query_start[s]), int(case.query_start[s + 1])
        wide_keys, wide_values = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
        for row in range(begin, end):
            position = len(keys) - end + row
            first = max(0, position - window + 1) if window else 0
            score = torch.einsum("hd,khd->hk", case.query[row].double(), wide_keys[first : position + 1]) * scale
            if soft_cap:
                score = soft_cap * torch.tanh(score / soft_cap)
            sink = torch.full((heads, 1), float("-inf")) if sinks is None else sinks.view(-1, 1)
            weights = torch.cat((score, sink.double()), dim=1).softmax(-1)[:, :-1]
            out[row] = torch.einsum("hk,khd->hd", weights, wide_values[first : position + 1])
    return out


MIXED = [(1, 1), (5, 5), (33, 1), (64, 64), (31, 2), (100, 7), (96, 1), (70, 70)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("block_size", [1, 4, 8, 15, 16, 24, 32, 48])
def test_decode_and_chunks_in_one_batch(ops: Backend, dtype: torch.dtype, block_size: int) -> None:
    case = make_case(MIXED, block_size=block_size, dtype=dtype)
    assert_close(case.run(ops), dense_attention(case))


@pytest.mark.parametrize("head_dim", [2, 10, 16, 24, 32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_head_sizes(ops: Backend, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    case = make_case([(37, 1), (40, 9)], head_dim=head_dim, block_size=block_size, dtype=dtype)
    scale = head_dim**-0.5
    assert_close(case.run(ops, scale), dense_attention(case, scale))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 3), (9, 3), (7, 1), (48, 1), (12, 2), (96, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_query_heads_per_kv_head(ops: Backend, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    case = make_case([(35, 1), (50, 13)], heads=heads, kv_heads=kv_heads, block_size=16, dtype=dtype)
    assert_close(case.run(ops), dense_attention(case))


@pytest.mark.parametrize("window", [1, 2, 5, 31, 32, 33, 64, 300, 500])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_window_reads_nothing_before_it(ops: Backend, threads: int, block_size: int, window: int) -> None:
    # blocks before the window are not even in the block table, and the rest of a block that it cuts holds NaN
    lengths = [(1, 1), (90, 1), (97, 40), (70, 70), (33, 2), (600, 1)]
    case = make_case(lengths, block_size=block_size, window=window)
    assert_close(case.run(ops, window=window), dense_attention(case, window=window))


def test_window_keeps_exactly_its_keys(ops: Backend) -> None:
    # length 500, window 409: keys 91 to 499 are seen, 90 is not
    case = make_case([(500, 1)], head_dim=16, window=409)
    for position, seen in ((90, False), (91, True), (499, True)):
        at = int(case.block_table[0, position // 4])
        if seen:
            before = case.run(ops, window=409)
            case.v_cache[at, position % 4] += 100.0
            assert not torch.equal(before, case.run(ops, window=409)), position
            case.v_cache[at, position % 4] -= 100.0
        else:
            assert at == NOBODY or bool(torch.isnan(case.v_cache[at, position % 4]).all())


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
def test_soft_cap(ops: Backend, soft_cap: float) -> None:
    case = make_case([(40, 1), (70, 20)])
    assert_close(case.run(ops, 1.0, 0, soft_cap), dense_attention(case, 1.0, 0, soft_cap))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [0, 40])
def test_a_sink_for_each_head(ops: Backend, dtype: torch.dtype, window: int) -> None:
    # below all scores, among them and above; alone, and with spans that threads share
    sinks = torch.tensor([-200.0, -1.0, 0.5, 2.0, 9.0, 1.5])
    for lengths in ([*MIXED, (600, 90)], [(1100, 1)]):
        case = make_case(lengths, heads=6, kv_heads=2, block_size=16, window=window, dtype=dtype)
        want = dense_attention(case, window=window, sinks=sinks)
        assert_close(case.run(ops, window=window, sinks=sinks), want)
        assert (want[: int(case.query_start[-1]), 4].abs().amax(1) < 0.1).any(), "the largest sink takes nearly all"
        gone = case.run(ops, window=window, sinks=torch.full((6,), -1e30))
        assert torch.equal(gone, case.run(ops, window=window))


def test_a_sink_that_is_not_a_number_comes_out(ops: Backend) -> None:
    case = make_case([(40, 2)], padding=0)
    got = case.run(ops, sinks=torch.tensor([0.0, float("nan"), 0.0, 0.0]))
    assert got[:, 1].isnan().all() and got[:, [0, 2, 3]].isfinite().all()


def test_large_scores_stay_finite(ops: Backend) -> None:
    case = make_case([(70, 70), (200, 1)])
    case.query *= 1000.0
    got = case.run(ops)
    assert torch.isfinite(got).all()
    assert (got.double() - dense_attention(case)).abs().max() < 1e-2  # all weight on one key, or nearly


def test_padding_rows_are_zero_and_sequences_without_queries_are_passed_over(ops: Backend) -> None:
    case = make_case([(9, 0), (5, 5), (33, 0), (40, 1)], padding=5)
    got = case.run(ops)
    assert_close(got, dense_attention(case))
    assert (got[6:] == 0).all()


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("query", [torch.float32, torch.bfloat16])
def test_every_type_of_query_meets_every_type_of_cache(ops: Backend, query: torch.dtype, cache: torch.dtype) -> None:
    case = make_case(MIXED, dtype=cache, block_size=16, head_dim=32)
    case.query = case.query.to(query)
    assert_close(case.run(ops), dense_attention(case))


def test_int8_is_off_by_no_more_than_its_steps(ops: Backend) -> None:
    """Against the vectors before they were rounded: what half a step of every key and value can do, and no more."""
    keys, head_dim, scale = 300, 64, 0.125
    case = make_case([(keys, 1)], heads=2, kv_heads=2, head_dim=head_dim, block_size=16, dtype=torch.int8, padding=0)
    random = torch.Generator().manual_seed(5)
    exact = [torch.randn((keys, 2, head_dim), generator=random) for _ in range(2)]
    for cache, vectors in zip((case.k_cache, case.v_cache), exact, strict=True):
        cache[case.block_table[0, torch.arange(keys) // 16].long(), torch.arange(keys) % 16] = encode(
            vectors, torch.int8
        )
    case.keys, case.values = [[vectors] for vectors in exact]
    off = (case.run(ops, scale).double() - dense_attention(case, scale)).abs()
    half_steps = [vectors.double().abs().amax(-1) / 254 for vectors in exact]  # [keys, heads]
    # a score is off by at most d, so a weight by a factor of at most e^2d, and a result by (e^2d - 1) of a value
    score = scale * (case.query[0].double().abs().sum(-1) * half_steps[0]).amax(0)
    bound = (torch.exp(2 * score) - 1) * exact[1].double().abs().amax((0, 2)) + half_steps[1].amax(0)
    assert (off[0].amax(-1) <= bound).all()
    assert off.max() > 1e-4, "nothing was rounded"


@pytest.mark.parametrize(("dtype", "block_size"), [(torch.float32, 4), (torch.bfloat16, 16), (torch.int8, 16)])
@pytest.mark.parametrize("window", [0, 45])
def test_bits_do_not_depend_on_chunks_or_neighbours(
    ops: Backend, threads: int, window: int, dtype: torch.dtype, block_size: int
) -> None:
    sinks = torch.linspace(-2, 2, 6) if window else None
    whole, others = (
        make_case(lengths, heads=6, kv_heads=2, head_dim=24, block_size=block_size, dtype=dtype, padding=0, seed=seed)
        for seed, lengths in enumerate(([(130, 130)], [(77, 1), (50, 33), (130, 2)]))
    )
    want = whole.run(ops, window=window, sinks=sinks)
    cache = [torch.cat(pair) for pair in ((whole.k_cache, others.k_cache), (whole.v_cache, others.v_cache))]
    table = torch.full((4, max(whole.block_table.shape[1], others.block_table.shape[1])), NOBODY, dtype=torch.int32)
    table[1:, : others.block_table.shape[1]] = others.block_table + len(whole.k_cache)
    table[0, : whole.block_table.shape[1]] = whole.block_table[0]
    cuts = {1: range(0, 130, 3), 7: range(0, 130, 7), 64: range(0, 130, 64), 130: (0,)}
    for size, begins in cuts.items():
        for begin in begins:
            end = min(begin + size, 130)
            rows = whole.query[begin:end]
            paging = Paging(table[:1], torch.tensor([0, end - begin]).int(), torch.tensor([end]).int())
            alone = attend(ops, rows, cache, paging, 0.25, window, sinks=sinks)
            assert torch.equal(alone, want[begin:end]), f"queries {begin} to {end}, alone"
            starts = torch.cat((torch.zeros(1), end - begin + others.query_start)).int()
            kv_len = torch.cat((torch.tensor([end]), others.kv_len)).int()
            batch = torch.cat((rows, others.query))
            beside = attend(ops, batch, cache, Paging(table, starts, kv_len), 0.25, window, sinks=sinks)
            assert torch.equal(beside[: end - begin], want[begin:end]), f"queries {begin} to {end}, beside others"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [0, 300])
def test_bits_of_a_long_sequence_do_not_depend_on_who_computes_its_spans(
    ops: Backend, window: int, dtype: torch.dtype
) -> None:
    """Alone its last query is shared out among threads; in a chunk, or beside others, or on one thread it is not."""
    length, last = 1100, 40
    sinks = torch.linspace(-2, 2, 6) if window else None
    case = make_case([(length, last)], heads=6, kv_heads=2, head_dim=32, block_size=16, dtype=dtype, padding=0)
    assert_close(case.run(ops, window=window, sinks=sinks), dense_attention(case, window=window, sinks=sinks))
    many = [case.block_table] * 9
    torch.set_num_threads(1)
    want = case.run(ops, window=window, sinks=sinks)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        chunk = case.run(ops, window=window, sinks=sinks)
        for queries in (1, 3, last):
            rows = case.query[last - queries :]
            ends = torch.tensor([0, queries]).int()
            cache, paging = (case.k_cache, case.v_cache), Paging(many[0], ends, case.kv_len)
            alone = attend(ops, rows, cache, paging, 0.25, window, sinks=sinks)
            assert torch.equal(alone, chunk[last - queries :]), f"{queries} queries on {threads} threads"
        ends, kv_len = torch.arange(10).int(), torch.full((9,), length).int()
        batch = attend(
            ops,
            case.query[-1:].repeat(9, 1, 1),
            (case.k_cache, case.v_cache),
            Paging(torch.cat(many), ends, kv_len),
            0.25,
            window,
            sinks=sinks,
        )
        assert all(torch.equal(row, chunk[-1]) for row in batch), f"among nine on {threads} threads"
        assert torch.equal(chunk, want), f"{threads} threads"
    torch.set_num_threads(2)


@pytest.mark.parametrize(("window", "broken", "at", "sound"), [(0, 64, (14, 50, 63), 20), (5, 40, (36, 39), 64)])
def test_a_nan_that_is_seen_comes_out_and_stays_in_its_sequence(
    ops: Backend, window: int, broken: int, at: tuple[int, ...], sound: int
) -> None:
    # the sound sequences leave a part of their only tile empty, where the broken one before them had its NaN
    torch.set_num_threads(1)
    case = make_case([(broken, 1), (sound, 1), (sound, 2)], window=window)
    for position in at:
        for cache in (case.k_cache, case.v_cache):
            cache[case.block_table[0, position // 4], position % 4] = float("nan")
    got = case.run(ops, window=window)
    assert torch.isnan(got[0]).all()
    assert_close(got[1:], dense_attention(case, window=window)[1:])


def test_blocks_far_into_a_large_cache(ops: Backend) -> None:
    # more than 2³¹ values lie before the block: offsets must not be computed in 32 bits. Memory is only touched at
    # that block
    torch.utils.deterministic.fill_uninitialized_memory = False
    block = 2**31 // (16 * 64) + 3
    caches = [torch.empty((block + 1, 16, 1, 64), dtype=torch.bfloat16) for _ in range(2)]
    small = make_case([(12, 1)], heads=2, kv_heads=1, head_dim=64, block_size=16, dtype=torch.bfloat16)
    for number, (cache, small_cache) in enumerate(zip(caches, (small.k_cache, small.v_cache), strict=True)):
        cache[block] = laid_out(small_cache, ops.kv_layout, keys=number == 0)[small.block_table[0, 0]]
    table = torch.tensor([[block]], dtype=torch.int32)
    got = ops.paged_attention(small.query, *caches, Paging(table, small.query_start, small.kv_len), 0.25)
    assert_close(got, dense_attention(small))
