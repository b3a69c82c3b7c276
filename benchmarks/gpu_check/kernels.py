"""How fast attention is: keys and values read a second beside a copy's bytes, and products a second of prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from headrace.kernels.attention import Paging, SharedPrefix
from headrace.kernels.gpu.decode import decode_attention
from headrace.kernels.gpu.ops import device_capability, sharing
from headrace.kernels.gpu.prefill import prefill_attention
from headrace.kernels.gpu.shapes import Attention, make_scratch
from headrace.kernels.kv_layout import FLOAT8_LARGEST, cached_width

from ..sections import Line, Plot
from . import kernels_rows
from .notebook import Notebook
from .sizes import CACHED, NAMES

TITLE = "Speed of kernels"
HOW = (
    "CUDA events around each call, which the host has put into the line before it begins; the L2 cache is flushed "
    "before each; median of 20 after 5. Bytes are those of keys and values, scales of int8 included; the share is of "
    "what a large copy on the device moves, bytes read and written."
)
BLOCK = 16
TARGET_US, TARGET_SHARE = 300.0, 0.85


@dataclass(frozen=True, slots=True)
class Measured:
    """What is measured."""

    heads: int
    kv_heads: int
    head_dim: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    target: tuple[int, int]  # batch and context
    room: tuple[int, ...]  # positions for which there is room, as a runner's longest text says: what binaries depend on
    prefixes: tuple[int, ...]
    sharers: int
    own: int  # positions of each sequence behind a shared prefix
    prompts: tuple[tuple[int, int, int], ...]  # sequences, queries of each, positions before
    copied_bytes: int


REAL = Measured(
    32, 8, 128, (1, 8, 32, 64, 128, 256), (512, 2048, 4096, 8192, 32_768), (64, 4096), (8192, 32_768), (2048, 8192),
    64, 256, ((1, 8192, 0), (8, 1024, 0), (1, 512, 8192)), 4 << 30,
)  # fmt: skip
TINY = Measured(2, 1, 80, (1, 2), (64, 128), (2, 128), (128,), (64,), 3, 5, ((1, 20, 0), (1, 5, 40)), 1 << 20)


@dataclass(slots=True)
class Bench:
    """The device's memory and its measured bandwidth."""

    notes: Notebook
    sizes: Measured
    copy_rate: float  # bytes a second

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.notes.ground.device

    def share(self, moved: float, seconds: float) -> float:
        """Bytes a second as a share of a copy's."""
        return moved / seconds / self.copy_rate


def find(notes: Notebook) -> None:
    """Measure everything."""
    sizes = TINY if notes.ground.dry else REAL
    bench = Bench(notes, sizes, 1.0)
    notes.measure("copy on the device", partial(_copy, bench))
    for cached in CACHED:
        notes.measure(f"decode, {NAMES[cached]}", partial(_decode, bench, cached))
    notes.measure("shared prefixes", partial(_shared, bench))
    notes.measure("prefill", partial(_prefill, bench))
    kernels_rows.find(notes, bench.copy_rate)


def _copy(bench: Bench) -> None:
    source = torch.ones(bench.sizes.copied_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.notes.ground.seconds(lambda: target.copy_(source), flush=False)
    bench.copy_rate = 2 * source.nbytes / seconds
    bench.notes.row("Copy", ("bytes", "TB/s, read and written"), source.nbytes, _figure(bench, bench.copy_rate / 1e12))


def _figure(bench: Bench, value: float) -> Any:
    return bench.notes.figure(value)


def filled(shape: Sequence[int], cached: torch.dtype, device: torch.device) -> torch.Tensor:
    """A cache of finite values."""
    if cached.itemsize > 1:
        return torch.randn(tuple(shape), device=device).to(cached)
    return torch.randint(0, 100, tuple(shape), dtype=torch.uint8, device=device).view(cached)


def _pool(bench: Bench, cached: torch.dtype, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = cached_width(bench.sizes.head_dim, cached)
    part = filled((min(blocks, 4096), BLOCK, bench.sizes.kv_heads, width), cached, bench.device)
    made = [torch.empty((blocks, *part.shape[1:]), dtype=cached, device=bench.device) for _ in range(2)]
    for cache in made:
        for begin in range(0, blocks, len(part)):
            end = min(begin + len(part), blocks)
            cache[begin:end].view(torch.uint8).copy_(part[: end - begin].view(torch.uint8))
    return made[0], made[1]


def _paging(bench: Bench, batch: int, context: int, room: int, queries: int = 1) -> Paging:
    """Sequences on blocks at random."""
    each = -(-context // BLOCK)
    blocks = torch.randperm(batch * each, device=bench.device).int().view(batch, each)
    table = torch.zeros((batch, -(-room // BLOCK)), dtype=torch.int32, device=bench.device)
    table[:, :each] = blocks
    starts = torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=bench.device)
    return Paging(table, starts, torch.full_like(table[:, 0], context), queries)


def _how(bench: Bench, cached: torch.dtype) -> Attention:
    scales = torch.ones((2, bench.sizes.kv_heads), device=bench.device) if cached in FLOAT8_LARGEST else None
    return Attention(bench.sizes.head_dim**-0.5, kv_scales=scales)


def _decode(bench: Bench, cached: torch.dtype) -> None:
    sizes, notes = bench.sizes, bench.notes
    position_bytes = 2 * sizes.kv_heads * cached_width(sizes.head_dim, cached) * cached.itemsize
    largest = min(max(sizes.batches) * max(sizes.contexts), int(0.8 * notes.ground.free_bytes()) // position_bytes)
    pool = _pool(bench, cached, largest // BLOCK)
    lines: dict[int, list[tuple[float, float]]] = {}
    for context in sizes.contexts:
        for batch in sizes.batches:
            if batch * context > largest:
                notes.note(f"Decode of {batch} × {context} in {NAMES[cached]} was left out: the memory is too small")
                continue
            seconds = _decode_seconds(bench, cached, pool, batch, context)
            share = bench.share(batch * context * position_bytes, seconds)
            lines.setdefault(context, []).append((batch, 1.0 if notes.ground.dry else share))
            figures = [notes.figure(each) for each in (seconds * 1e6, share * bench.copy_rate / 1e12, share)]
            beside = _sdpa(bench, batch, context) if cached == torch.bfloat16 and context == sizes.target[1] else None
            notes.row("Decode, a layer", _DECODE_COLUMNS, NAMES[cached], batch, context, *figures, beside)
            if cached == torch.bfloat16 and (batch, context) == sizes.target:
                what = f"decode, a layer, batch {batch}, context {context}, bf16"
                notes.claim(f"{what}: time", seconds * 1e6, TARGET_US, "µs", at_most=True)
                notes.claim(f"{what}: share of a copy", share, TARGET_SHARE, "", at_most=False)
    _draw(notes, cached, lines)


_DECODE_COLUMNS = ("cache", "batch", "context", "µs", "TB/s", "share of a copy", "torch's SDPA, not paged, µs")


def _draw(notes: Notebook, cached: torch.dtype, lines: dict[int, list[tuple[float, float]]]) -> None:
    few = sorted(lines)[-4:]
    made = tuple(
        Line(f"context {context}", tuple(x for x, _ in lines[context]), tuple(y for _, y in lines[context]))
        for context in few
    )
    dry = " (dry run: nothing is measured)" if notes.ground.dry else ""
    name = NAMES[cached]
    label = "share of a copy's bytes a second"
    notes.plot(Plot(f"decode_{name.replace(' ', '_')}", f"Decode, {name}{dry}", "batch", label, made, log_x=True))


def _decode_seconds(
    bench: Bench, cached: torch.dtype, pool: tuple[torch.Tensor, torch.Tensor], batch: int, context: int
) -> float:
    sizes = bench.sizes
    room = next(each for each in sizes.room if each >= context)
    query = torch.randn((batch, sizes.heads, sizes.head_dim), device=bench.device).bfloat16()
    out, paging = torch.empty_like(query), _paging(bench, batch, context, room)
    scratch = make_scratch(batch, sizes.heads, sizes.head_dim, room, bench.device)
    how = _how(bench, cached)
    return bench.notes.ground.seconds(lambda: decode_attention(query, *pool, paging, out, how, scratch))


def _sdpa(bench: Bench, batch: int, context: int) -> Any:
    """Torch's own attention over keys and values that lie side by side, for what a table has beside ours."""
    sizes = bench.sizes
    query = torch.randn((batch, sizes.heads, 1, sizes.head_dim), device=bench.device).bfloat16()
    keys, values = torch.randn((2, batch, sizes.kv_heads, context, sizes.head_dim), device=bench.device).bfloat16()
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    return _figure(bench, bench.notes.ground.seconds(lambda: attend(query, keys, values, enable_gqa=True)) * 1e6)


def _shared(bench: Bench) -> None:
    """One prefix among some sequences, read once and read by each."""
    sizes, notes = bench.sizes, bench.notes
    for prefix in sizes.prefixes:
        context = prefix + sizes.own
        room = -(-context // max(sizes.room)) * max(sizes.room)
        query = torch.randn((sizes.sharers, sizes.heads, sizes.head_dim), device=bench.device).bfloat16()
        pool = _pool(bench, torch.bfloat16, sizes.sharers * (-(-context // BLOCK)))
        paging, out = _paging(bench, sizes.sharers, context, room), torch.empty_like(query)
        paging.block_table[:, : prefix // BLOCK] = paging.block_table[0, : prefix // BLOCK].clone()
        split, per_tile = sharing(room, sizes.heads // sizes.kv_heads)
        tiles = torch.arange(-(-sizes.sharers // per_tile) * per_tile, device=bench.device).int().view(-1, per_tile)
        tiles = torch.where(tiles < sizes.sharers, tiles, -1)
        whole = torch.full((len(tiles),), prefix // split * split, dtype=torch.int32, device=bench.device)
        shared = SharedPrefix(tiles, whole, torch.full_like(paging.kv_len, prefix // split * split))
        scratch = make_scratch(sizes.sharers, sizes.heads, sizes.head_dim, room, bench.device)
        taken: list[float] = []
        for each in (None, shared):
            how, given = _how(bench, torch.bfloat16), replace(paging, shared=each)
            taken.append(notes.ground.seconds(partial(decode_attention, query, *pool, given, out, how, scratch)))
        figures = [notes.figure(each) for each in (taken[0] * 1e6, taken[1] * 1e6, taken[0] / taken[1])]
        columns = ("sequences", "prefix", "own", "each for itself, µs", "read once, µs", "times as fast")
        notes.row("Shared prefix, a layer, bf16", columns, sizes.sharers, prefix, sizes.own, *figures)


def _prefill(bench: Bench) -> None:
    sizes, notes = bench.sizes, bench.notes
    for cached in (torch.bfloat16, torch.float8_e4m3fn):
        for count, queries, before in sizes.prompts:
            context = before + queries
            query = torch.randn((count * queries, sizes.heads, sizes.head_dim), device=bench.device).bfloat16()
            pool = _pool(bench, cached, count * (-(-context // BLOCK)))
            paging, out = _paging(bench, count, context, context, queries), torch.empty_like(query)
            how = _how(bench, cached)
            work = partial(prefill_attention, query, *pool, paging, out, how, device_capability())
            seconds = notes.ground.seconds(work)
            pairs = count * (queries * before + queries * (queries + 1) // 2)
            rate = 4 * sizes.heads * sizes.head_dim * pairs / seconds / 1e12
            beside = _causal(bench, count, queries, pairs) if cached == torch.bfloat16 and not before else None
            name = f"{count} × {queries}" + (f" behind {before}" if before else "")
            columns = ("cache", "prompts", "ms", "TFLOP/s", "torch's SDPA, not paged, TFLOP/s")
            figures = notes.figure(seconds * 1e3), notes.figure(rate)
            notes.row("Prefill, a layer", columns, NAMES[cached], name, *figures, beside)


def _causal(bench: Bench, count: int, queries: int, pairs: int) -> Any:
    sizes, attend = bench.sizes, torch.nn.functional.scaled_dot_product_attention
    query = torch.randn((count, sizes.heads, queries, sizes.head_dim), device=bench.device).bfloat16()
    keys, values = torch.randn((2, count, sizes.kv_heads, queries, sizes.head_dim), device=bench.device).bfloat16()
    every: Any = attend
    seconds = bench.notes.ground.seconds(lambda: every(query, keys, values, is_causal=True, enable_gqa=True))
    return _figure(bench, 4 * sizes.heads * sizes.head_dim * pairs / seconds / 1e12)
