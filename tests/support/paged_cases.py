"""Batches over a paged cache as the kernels of a GPU find it, with a float64 reference of their attention.

    case = make_case([(37, 1), (100, 7), (0, 0)], heads=4, kv_heads=2, cached=torch.int8)
    some_kernel(case.query, case.k_cache, case.v_cache, case.paging, out, how)
    case.check(out, how, case.rows_of(1))

Everything that no kernel may read is hostile: pages that are in nobody's table, slots behind a sequence's last key or
before its window hold NaN, and table entries without a block are 2^30. Block 0, to which a masked load of block ids
leads, is nobody's. Caches are views of one tensor of some layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headrace.kernels.attention import Paging, SharedPrefix
from headrace.kernels.gpu.shapes import Attention, Scratch
from headrace.kernels.kv_layout import FLOAT8_LARGEST, cached_width, decode, encode, laid_out, poison
from tests.support.tolerances import RESULT, assert_close

NOBODY = 2**30  # a block id that no cache has
CACHED = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


@dataclass(frozen=True)
class Case:
    """A batch; lengths are (keys, queries) of each sequence."""

    lengths: tuple[tuple[int, int], ...]
    query: torch.Tensor  # [rows, heads, head_dim]
    k_cache: torch.Tensor  # [blocks, block_size, kv_heads, width], by_head_rows
    v_cache: torch.Tensor
    paging: Paging
    kv_scales: torch.Tensor | None  # float32 [2, kv_heads] where the cache is float8
    keys: tuple[torch.Tensor, ...]  # per sequence float32 [keys, kv_heads, head_dim], as the cache has them
    values: tuple[torch.Tensor, ...]

    def rows_of(self, queries: int | None = None) -> torch.Tensor:
        """Bool [rows]: rows of the sequences with so many queries; None: of all that have keys and queries."""
        found = torch.zeros(len(self.query), dtype=torch.bool)
        row = 0
        for keys, count in self.lengths:
            found[row : row + count] = keys > 0 and queries in {None, count}
            row += count
        return found

    def how(self, **options: object) -> Attention:
        """Options of a layer with this cache's scales; the scale of scores is 1 / sqrt(head_dim)."""
        scale = self.query.shape[-1] ** -0.5
        return replace(Attention(scale, kv_scales=self.kv_scales), **options)  # type: ignore[arg-type]

    def check(self, out: torch.Tensor, how: Attention, rows: torch.Tensor) -> None:
        """Compare these rows with the reference; all others must be as `empty_out` made them."""
        want, slack = self.reference(how)
        assert_close(out[rows], want[rows], slack=slack[rows])
        assert out[~rows].isnan().all(), "a row was written that is none of this kernel's"

    def empty_out(self) -> torch.Tensor:
        return torch.full_like(self.query, float("nan"))

    def reference(self, how: Attention) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 [rows, heads, head_dim]: the attention, and by how much inner roundings may move it.

        Weights are rounded once to the query's type for their product with the values, so each term w · v is off by up
        to half a unit in the last place: together that unit times the sum of w · |v|. Weights of float16 below 2⁻¹⁴
        have a smallest step of 2⁻²⁴ of the largest. A capped score is a difference of numbers of the cap's size, each
        rounded in float32: the weight is off by four such roundings.
        """
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        slack = torch.zeros_like(out)
        unit = 0.0 if self.query.dtype == torch.float32 else RESULT[self.query.dtype]
        unit += how.soft_cap * 2.0**-22
        floor = 2.0**-25 if self.query.dtype == torch.float16 else 0.0
        row = 0
        for (keys, count), k, v in zip(self.lengths, self.keys, self.values, strict=True):
            if keys and count:
                rows = slice(row, row + count)
                weights = _weights(self.query[rows].double(), k.double(), how)
                wide = v.double().repeat_interleave(self.query.shape[1] // v.shape[1], dim=1)
                out[rows] = torch.einsum("nhk,khd->nhd", weights, wide)
                slack[rows] = unit * torch.einsum("nhk,khd->nhd", weights, wide.abs()) + floor * keys * wide.abs().max()
            row += count
        return out, slack

    def alone(self, sequence: int) -> Case:
        """The same cache with one sequence of the batch in it."""
        starts = self.paging.query_start.tolist()
        begin, end = starts[sequence], starts[sequence + 1]
        one = slice(sequence, sequence + 1)
        return replace(
            self,
            lengths=self.lengths[one],
            query=self.query[begin:end].clone(),
            paging=Paging(
                self.paging.block_table[one].clone(),
                torch.tensor([0, end - begin], dtype=torch.int32),
                self.paging.kv_len[one].clone(),
            ),
            keys=self.keys[one],
            values=self.values[one],
        )


def _weights(query: torch.Tensor, keys: torch.Tensor, how: Attention) -> torch.Tensor:
    """Float64 [queries, heads, keys]: what each query gives each key, the sink's share left out."""
    count, heads = query.shape[:2]
    score = torch.einsum("nhd,khd->nhk", query, keys.repeat_interleave(heads // keys.shape[1], dim=1)) * how.scale
    if how.soft_cap:
        score = how.soft_cap * torch.tanh(score / how.soft_cap)
    at, key = torch.arange(len(keys) - count, len(keys))[:, None], torch.arange(len(keys))
    seen = key <= at
    if how.window:
        seen &= key > at - how.window
    score = score.masked_fill(~seen[:, None], float("-inf"))
    sink = torch.full((heads,), float("-inf")) if how.sinks is None else how.sinks
    return torch.cat((score, sink.double()[None, :, None].expand(count, -1, 1)), dim=-1).softmax(-1)[..., :-1]


def make_case(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cached: torch.dtype | None = None,
    window: int = 0,
    padding: int = 3,
    seed: int = 0,
    prefixes: Sequence[tuple[Sequence[int], int]] = (),
) -> Case:
    """A batch of such (keys, queries), with rows of padding behind.

    dtype is the query's, cached the cache's (None: the same). window is only what decides what may be in the table.
    prefixes: (sequences, positions) whose first positions, a multiple of block_size, are the same blocks.
    """
    cached = cached or dtype
    random = torch.Generator().manual_seed(seed)
    widths = [-(-keys // block_size) for keys, _ in lengths]
    total = sum(widths) + 2
    scales = torch.rand((2, kv_heads), generator=random) + 0.5 if cached in FLOAT8_LARGEST else None
    table = torch.full((len(lengths), max([1, *widths]) + 1), NOBODY, dtype=torch.int32)
    order = (torch.randperm(total - 1, generator=random) + 1).tolist()
    encoded: list[list[torch.Tensor]] = [[], []]
    for s, (keys, queries) in enumerate(lengths):
        first = max(0, keys - queries - window + 1) // block_size if window else 0  # nobody sees what lies before
        for block in range(first, widths[s]):
            table[s, block] = order.pop()
        for number, rows in enumerate(encoded):
            vectors = torch.randn((max(1, keys), kv_heads, head_dim), generator=random)
            rows.append(encode(vectors, cached, None if scales is None else scales[number])[:keys])
    for sequences, positions in prefixes:
        for s in sequences[1:]:
            table[s, : positions // block_size] = table[sequences[0], : positions // block_size]
            for rows in encoded:
                rows[s].view(torch.uint8)[:positions] = rows[sequences[0]].view(torch.uint8)[:positions]
    caches = _filled(encoded, table, lengths, window, (total, block_size, kv_heads, cached_width(head_dim, cached)))
    starts = torch.tensor([0, *(queries for _, queries in lengths)]).cumsum(0).int()
    query = torch.randn((int(starts[-1]) + padding, heads, head_dim), generator=random).to(dtype)
    keys, values = (
        tuple(decode(each, None if scales is None else scales[number]) for each in rows)
        for number, rows in enumerate(encoded)
    )
    kv_len = torch.tensor([keys for keys, _ in lengths], dtype=torch.int32)
    paging = Paging(table, starts, kv_len, max((queries for _, queries in lengths), default=0))
    return Case(tuple(lengths), query, caches[0], caches[1], paging, scales, keys, values)


def _filled(
    encoded: list[list[torch.Tensor]],
    table: torch.Tensor,
    lengths: Sequence[tuple[int, int]],
    window: int,
    shape: tuple[int, int, int, int],
) -> torch.Tensor:
    """[2, blocks, block_size, kv_heads, width], by_head_rows: one layer's keys and values among those of three."""
    block_size = shape[1]
    cached = encoded[0][0].dtype
    flat = torch.empty((2, *shape), dtype=cached)
    poison(flat[None], range(shape[0]))
    for s, (keys, queries) in enumerate(lengths):
        position = torch.arange(max(0, keys - queries - window + 1) if window else 0, keys)
        at = table[s, position // block_size].long(), position % block_size
        for cache, rows in zip(flat, encoded, strict=True):
            cache.view(torch.uint8)[at] = rows[s].view(torch.uint8)[position]
    layers = torch.empty((3, 2, *shape), dtype=cached)
    poison(layers, range(shape[0]))
    for number in range(2):
        # bytes, because not every operation knows float8
        same = flat[number] if cached not in FLOAT8_LARGEST else flat[number].view(torch.uint8)
        layers[1, number] = laid_out(same, "by_head_rows", keys=number == 0).view(cached)
    return layers[1]


def poisoned_scratch(case: Case, num_splits: int, split: int) -> Scratch:
    """Scratch in which everything is NaN, for one sequence more than the batch has."""
    heads, head_dim = case.query.shape[1:]
    shape = (len(case.lengths) + 1, heads, num_splits)
    return Scratch(torch.full((*shape, head_dim), float("nan")), torch.full(shape, float("nan")), split)


def shared_prefix(case: Case, tiles: Sequence[tuple[Sequence[int], int]], per_tile: int, unused: int = 1) -> Case:
    """The case with such tiles (sequences, positions) of shared blocks, and some that are not in use."""
    seqs = torch.full((len(tiles) + unused, per_tile), -1, dtype=torch.int32)
    tile_len = torch.zeros(len(tiles) + unused, dtype=torch.int32)
    own_from = torch.zeros(len(case.lengths), dtype=torch.int32)
    for number, (sequences, positions) in enumerate(tiles):
        seqs[number, : len(sequences)] = torch.tensor(sequences, dtype=torch.int32)
        tile_len[number] = positions
        own_from[list(sequences)] = positions
    return replace(case, paging=replace(case.paging, shared=SharedPrefix(seqs, tile_len, own_from)))
