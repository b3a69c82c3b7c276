"""How fast the kernels around attention are: microseconds, and bytes a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from headrace.kernels.adjust import Adjustments
from headrace.kernels.gpu import gated, logprobs, rms_norm, rotary
from headrace.kernels.gpu.adjust import apply, pack
from headrace.kernels.gpu.block_copy import copy_blocks
from headrace.kernels.gpu.packing import PackedParameters
from headrace.kernels.gpu.packing import pack as pack_draw
from headrace.kernels.gpu.sample import draw
from headrace.kernels.kv_layout import cached_width
from tests.support.sampler_checks import parameters

from .notebook import Notebook
from .sizes import CACHED, NAMES

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Measured:
    """Sizes of a model, and how many rows a step has."""

    rows: tuple[int, ...]
    hidden: int
    middle: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    vocab: int
    layers: int
    copies: int


REAL = Measured((256, 8192), 4096, 14_336, 32, 8, 128, 256, 128_256, 32, 64)
TINY = Measured((2,), 40, 24, 2, 1, 16, 2, 331, 1, 2)
_COLUMNS = ("kernel", "what", "µs", "GB/s", "share of a copy")
Moved = tuple[str, str, int, Callable[[], object]]  # kernel, what, bytes read and written, call


def find(notes: Notebook, copy_rate: float) -> None:
    """Measure everything."""
    sizes = TINY if notes.ground.dry else REAL
    for group in (_norms, _gates, _rotations, _draws, _others):
        notes.measure(group.__name__.strip("_"), partial(_measure, notes, sizes, group, copy_rate))


def _measure(
    notes: Notebook, sizes: Measured, group: Callable[[Measured, torch.device], list[Moved]], copy_rate: float
) -> None:
    for kernel, what, moved, work in group(sizes, notes.ground.device):
        seconds = notes.ground.seconds(work)
        figures = (notes.figure(each) for each in (seconds * 1e6, moved / seconds / 1e9, moved / seconds / copy_rate))
        notes.row("Kernels around attention", _COLUMNS, kernel, what, *figures)


def _normal(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).bfloat16()


def _norms(sizes: Measured, device: torch.device) -> list[Moved]:
    made: list[Moved] = []
    weight = torch.ones(sizes.hidden, device=device)
    for rows in sizes.rows:
        x, residual = _normal(device, rows, sizes.hidden), _normal(device, rows, sizes.hidden)
        what = f"{rows} × {sizes.hidden}"
        made.append(("rms_norm", what, 2 * x.nbytes, partial(rms_norm.rms_norm, x, weight, 1e-5)))
        made.append(("add_rms_norm", what, 4 * x.nbytes, partial(rms_norm.add_rms_norm, x, residual, weight, 1e-5)))
    return made


def _gates(sizes: Measured, device: torch.device) -> list[Moved]:
    made: list[Moved] = []
    for rows in sizes.rows:
        gate_up, what = _normal(device, rows, 2 * sizes.middle), f"{rows} × {sizes.middle}"
        moved = gate_up.nbytes * 3 // 2
        made.append(("silu_mul", what, moved, partial(gated.silu_mul, gate_up)))
        made.append(("gelu_mul", what, moved, partial(gated.gelu_mul, gate_up)))
    return made


def _rotations(sizes: Measured, device: torch.device) -> list[Moved]:
    made: list[Moved] = []
    turned = torch.randn((max(sizes.rows), sizes.head_dim), device=device)
    scales = torch.ones((2, sizes.kv_heads), device=device)
    for rows in sizes.rows:
        qkv = _normal(device, rows, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim)
        at = torch.arange(rows, device=device)
        for cached in CACHED:
            shape = (-(-rows // BLOCK), BLOCK, sizes.kv_heads, cached_width(sizes.head_dim, cached))
            keys, values = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
            if cached.itemsize > 1:
                keys, values = (torch.zeros(shape, dtype=cached, device=device) for _ in range(2))
            keys, values = keys.view(cached), values.view(cached)
            stored = 2 * rows * sizes.kv_heads * shape[-1] * cached.itemsize
            moved = qkv.nbytes + rows * sizes.heads * sizes.head_dim * 2 + stored + rows * sizes.head_dim * 4
            work = partial(rotary.rotate_and_store, qkv, at, turned, keys, values, at, None, scales)
            made.append(("rotate_and_store", f"{rows} rows, {NAMES[cached]}", moved, work))
    return made


def _draws(sizes: Measured, device: torch.device) -> list[Moved]:
    scores = torch.randn((sizes.batch, sizes.vocab), device=device) * 3
    what, made = f"{sizes.batch} × {sizes.vocab}", list[Moved]()
    for name, wanted in (
        ("greedy", {"temperature": 0.0}),
        ("temperature", {"temperature": 0.8}),
        ("top_k 50", {"temperature": 0.8, "top_k": 50}),
        ("top_p 0.9", {"temperature": 0.8, "top_p": 0.9}),
        ("top_k, top_p, min_p", {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}),
    ):
        packed: PackedParameters = pack_draw(parameters(sizes.batch, **wanted)).to(device)
        made.append((f"sample, {name}", what, scores.nbytes, partial(draw, scores, packed)))
    return made


def _others(sizes: Measured, device: torch.device) -> list[Moved]:
    scores = torch.randn((sizes.batch, sizes.vocab), device=device)
    chosen, every = torch.zeros(sizes.batch, dtype=torch.int64, device=device), list(range(sizes.batch))
    count = sizes.batch * 16
    each = torch.arange(count)
    entries = Adjustments(each // 16, each % 16, torch.ones(count), torch.zeros(count), torch.zeros(count))
    words = pack(entries).to(device)
    shape = (sizes.layers, 2, 4 * sizes.copies, BLOCK, sizes.kv_heads, sizes.head_dim)
    cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    pairs = [(number, 2 * sizes.copies + number) for number in range(sizes.copies)]
    copied = 2 * cache.nbytes // 4
    what = f"{sizes.batch} × {sizes.vocab}"
    logprob = partial(logprobs.logprobs, scores, every, chosen, [5] * sizes.batch)
    return [
        ("logprobs, best 5", what, scores.nbytes, logprob),
        ("adjust", f"{count} scores", count * 28, partial(apply, scores, words)),
        ("copy_blocks", f"{sizes.copies} blocks, {sizes.layers} layers", copied, partial(copy_blocks, cache, pairs)),
    ]
