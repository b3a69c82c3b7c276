"""How large everything is: as on a real model, or so small that an interpreter has it done in seconds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support.rotary_checks import Shape as RotaryShape

CACHED = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
NAMES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8 e4m3", torch.float8_e5m2: "fp8 e5m2", torch.int8: "int8"}
Lengths = tuple[tuple[int, int], ...]  # of each sequence: keys, queries


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of one kind of model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckSizes:
    """Of the checks of single kernels."""

    heads: tuple[Heads, ...]
    cached: tuple[torch.dtype, ...]
    split: int
    one_split: Lengths
    many_splits: Lengths
    prompts: Lengths
    prefix: int  # positions that sequences share
    rotary: tuple[RotaryShape, ...]
    hidden: int
    middle: int
    rows: int
    vocab: int
    drawn: int  # rows of scores
    layers: int  # of a cache whose blocks are copied
    block_width: int


REAL = CheckSizes(
    heads=(
        Heads("128", 32, 8, 128),
        Heads("256, window, cap", 16, 8, 256, window=1024, soft_cap=50.0),
        Heads("96", 32, 32, 96),
    ),
    cached=CACHED,
    split=256,
    one_split=((1, 1), (17, 1), (0, 1), (100, 1), (255, 1), (256, 1)),
    many_splits=((257, 1), (1, 1), (1000, 1), (5, 5), (0, 1), (2049, 1), (33, 1), (1536, 1)),
    prompts=((1, 1), (5, 5), (0, 0), (700, 700), (1300, 77), (40, 0), (2049, 512), (64, 64)),
    prefix=512,
    rotary=(
        RotaryShape(128, 128, 32, 8),
        RotaryShape(128, 128, 16, 8, "head"),
        RotaryShape(256, 256, 16, 8),
        RotaryShape(96, 96, 32, 32),
    ),
    hidden=4096,
    middle=14_336,
    rows=300,
    vocab=128_256,
    drawn=12,
    layers=8,
    block_width=128,
)
TINY = CheckSizes(
    heads=(Heads("16", 2, 1, 16), Heads("16, window, cap", 2, 1, 16, window=40, soft_cap=50.0)),
    cached=(torch.bfloat16, torch.float8_e4m3fn, torch.int8),
    split=64,
    one_split=((1, 1), (0, 1), (64, 1)),
    many_splits=((65, 1), (5, 5), (0, 1), (129, 1)),
    prompts=((1, 1), (5, 5), (0, 0), (70, 20)),
    prefix=64,
    rotary=(RotaryShape(16, 16, 4, 2, "head"),),
    hidden=48,
    middle=40,
    rows=3,
    vocab=331,
    drawn=4,
    layers=2,
    block_width=16,
)


def check_sizes(dry: bool) -> CheckSizes:
    """Sizes for a GPU, or for none."""
    return TINY if dry else REAL
