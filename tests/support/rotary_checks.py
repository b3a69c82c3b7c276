"""Cases and checks of `rotate_and_store` for caches in the layout by_head_rows.

Each check takes the module that has the function, so that it can be shown a faulty one.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from headrace.kernels.kv_layout import FLOAT8_LARGEST, by_position, cached_width, decode, encode, laid_out
from headrace.kernels.rotary import QueryKeyNorm
from tests.support.attention_checks import untouched
from tests.support.tolerances import assert_close

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, *FLOAT8_LARGEST]
BLOCKS, BLOCK_SIZE, EPS = 6, 4, 1e-1
POSITIONS = torch.tensor([0, 41, 7, 99, 5])
SLOTS = torch.tensor([22, 0, -1, 5, 19])
ROWS = len(SLOTS)


@dataclass(frozen=True)
class Shape:
    head_dim: int
    rotary_dim: int | None
    heads: int
    kv_heads: int
    norm: str = "none"

    def __str__(self) -> str:
        return f"{self.head_dim}-{self.rotary_dim}-{self.heads}-{self.kv_heads}-{self.norm}"


SHAPES = [
    Shape(16, 16, 4, 2),
    Shape(64, 32, 3, 3, "head"),
    Shape(80, 80, 7, 1, "row"),
    Shape(96, 96, 2, 2, "head"),
    Shape(128, None, 4, 2, "row"),
    Shape(128, 128, 20, 10),  # several tiles of heads, the last not full
    Shape(192, 64, 2, 1, "head"),
    Shape(256, 256, 6, 5, "head"),
    Shape(10, 10, 6, 3, "row"),
    Shape(10, 4, 5, 5, "head"),
    Shape(16, None, 1, 1, "head"),
]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv_of(shape: Shape, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> torch.Tensor:
    return randn(rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype=dtype)


def norm_of(shape: Shape) -> QueryKeyNorm | None:
    if shape.norm == "none":
        return None
    heads, kv_heads = (1, 1) if shape.norm == "head" else (shape.heads, shape.kv_heads)
    return QueryKeyNorm(randn(heads * shape.head_dim, seed=1), randn(kv_heads * shape.head_dim, seed=2), EPS)


def angles_of(shape: Shape) -> torch.Tensor:
    rotary_dim = shape.rotary_dim or 0
    return torch.outer(torch.arange(100, dtype=torch.float64), torch.linspace(1, 0.01, rotary_dim // 2).double())


def table_of(shape: Shape) -> torch.Tensor | None:
    angles = angles_of(shape)
    return None if shape.rotary_dim is None else torch.cat((angles.cos(), angles.sin()), dim=1).float()


def scales_of(shape: Shape, dtype: torch.dtype) -> torch.Tensor | None:
    return 0.01 + randn(2, shape.kv_heads, seed=3).abs() if dtype in FLOAT8_LARGEST else None


def caches_of(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values whose every byte is 85."""
    size = (2, BLOCKS, BLOCK_SIZE, shape.kv_heads, cached_width(shape.head_dim, dtype) * dtype.itemsize)
    keys, values = torch.full(size, 85, dtype=torch.uint8).view(dtype)
    return keys, values


def split(shape: Shape, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return qkv.view(len(qkv), -1, shape.head_dim).split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)


def want64(shape: Shape, qkv: torch.Tensor) -> list[torch.Tensor]:
    """Queries and keys, normed and turned, in float64."""
    norm, found = norm_of(shape), list(split(shape, qkv.double())[:2])
    if norm is not None:
        for number, weight in enumerate((norm.query, norm.key)):
            together = found[number].reshape(len(qkv), -1, len(weight))
            scale = (together.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
            found[number] = (together / scale * weight.double()).view(found[number].shape)
    if shape.rotary_dim is not None:
        half, angles = shape.rotary_dim // 2, angles_of(shape)[POSITIONS]
        for number, x in enumerate(found):
            numbers = torch.complex(x[..., :half].contiguous(), x[..., half : 2 * half].contiguous())
            turned = numbers * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
            found[number] = torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)
    return found


def vectors(cache: torch.Tensor) -> torch.Tensor:
    """Bytes of the vectors, and their scales, of all slots: uint8 [slots, kv_heads, width in bytes]."""
    blocks, block_size, kv_heads, width = cache.shape
    whole = by_position(cache if cache.dtype == torch.int8 else cache.view(torch.uint8), "by_head_rows", keys=True)
    return whole.view(torch.uint8).view(blocks * block_size, kv_heads, width * cache.element_size())


def check_untouched(cache: torch.Tensor) -> None:
    others = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    others[SLOTS[SLOTS >= 0]] = False
    assert (vectors(cache)[others] == 85).all(), "a slot that nothing is stored in has other bytes"


def check_floats(module: ModuleType, shape: Shape, dtype: torch.dtype) -> None:
    """Queries of all rows, and keys and values of those with a slot, in a cache of qkv's own type."""
    qkv = qkv_of(shape, dtype)
    before, caches = qkv.clone(), caches_of(shape, dtype)
    query = module.rotate_and_store(qkv, POSITIONS, table_of(shape), *caches, SLOTS, norm_of(shape))
    assert torch.equal(qkv, before), "the input was changed"
    want_query, want_key = want64(shape, qkv)
    assert query.is_contiguous()
    assert_close(query, want_query)
    live = SLOTS >= 0
    keys, values = (vectors(cache).view(dtype)[SLOTS[live]] for cache in caches)
    assert_close(keys, want_key[live])
    assert torch.equal(values, split(shape, qkv)[2][live])
    for cache in caches:
        check_untouched(cache)


def check_rounded(module: ModuleType, shape: Shape, dtype: torch.dtype) -> None:
    """Keys and values of a cache that rounds are those of float64, but for half a step."""
    qkv, caches, scales = qkv_of(shape), caches_of(shape, dtype), scales_of(shape, dtype)
    module.rotate_and_store(qkv, POSITIONS, table_of(shape), *caches, SLOTS, norm_of(shape), scales)
    live = SLOTS >= 0
    for number, exact in enumerate((want64(shape, qkv)[1], split(shape, qkv)[2].double())):
        own = None if scales is None else scales[number]
        cached = vectors(caches[number])[SLOTS[live]].contiguous().view(dtype)
        got, want = decode(cached, own).double(), exact[live]
        if own is None:
            allowed = want.abs().amax(-1, keepdim=True) / 127 * 0.501 + want.abs() * 1e-5
        else:  # half a unit of the last of 3 bits, or of 2, and below the normal numbers half of the least one
            bits, least = (4, 2.0**-10) if dtype == torch.float8_e4m3fn else (3, 2.0**-17)
            most = FLOAT8_LARGEST[dtype] * own.double()[:, None]
            want.clamp_(-most, most)
            allowed = want.abs() * (2.0**-bits + 1e-5) + least * own.double()[:, None]
        assert ((got - want).abs() <= allowed).all(), f"off by {(got - want).abs().max():.3g}"
        check_untouched(caches[number])


def specials(dtype: torch.dtype) -> torch.Tensor:
    """Values of a float8 type, what is half-way between neighbours, and what is a bit away from there."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = codes[codes.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    near = [torch.nextafter(middle, torch.full_like(middle, sign)) for sign in (-torch.inf, torch.inf)]
    most = FLOAT8_LARGEST[dtype]
    far = torch.tensor(
        [most * 1.05, most * 1.2, -most * 2, 3e38, -3e38, torch.inf, -torch.inf, torch.nan, 1e-9, -1e-40]
    )
    return torch.cat((finite, middle, *near, far))


def check_bytes(module: ModuleType, shape: Shape, dtype: torch.dtype) -> None:
    """Without norm and rotation the cache is, byte for byte, what `encode` makes, in its layout."""
    qkv, caches, scales = qkv_of(shape), caches_of(shape, dtype), scales_of(shape, dtype)
    module.rotate_and_store(qkv, POSITIONS, None, *caches, SLOTS, None, scales)
    live = SLOTS >= 0
    for number, cache in enumerate(caches):
        stored = encode(split(shape, qkv)[number + 1], dtype, None if scales is None else scales[number])[live]
        whole = caches_of(shape, dtype)[0].view(torch.uint8)
        whole.view(-1, *whole.shape[2:])[SLOTS[live]] = stored.view(torch.uint8)
        want = laid_out(whole if dtype in FLOAT8_LARGEST else whole.view(dtype), "by_head_rows", keys=number == 0)
        assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))


def check_every_float8(module: ModuleType, dtype: torch.dtype) -> None:
    """Rounding, saturation and NaN are those of torch, for everything that could tell two ways of rounding apart."""
    values = specials(dtype)
    shape = Shape(256, None, 1, -(-len(values) // 256))
    padded = torch.cat((values, torch.zeros(shape.kv_heads * 256 - len(values)))).view(shape.kv_heads, 256)
    qkv = torch.cat((torch.zeros(1, 256), padded.view(1, -1), -padded.view(1, -1)), dim=1)
    caches, scales = caches_of(shape, dtype), torch.full((2, shape.kv_heads), 0.5)
    scales[1] = 3.0  # quotients that are not exact
    module.rotate_and_store(qkv, POSITIONS[:1], None, *caches, SLOTS[:1], None, scales)
    for number, (cache, sign) in enumerate(zip(caches, (1, -1), strict=True)):
        want = encode(sign * padded, dtype, scales[number])
        assert torch.equal(vectors(cache)[SLOTS[0]], want.view(torch.uint8))


def check_odd_int8(module: ModuleType) -> None:
    """Vectors of int8 that are 0, tiny, halfway between steps, or not finite: as `encode` has them."""
    shape = Shape(16, None, 1, 9)
    rows = [[0.0] * 16, [1e-39, -5e-40], [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5], [1e38, -3e38, 2e37], [-1.0, 1.0]]
    rows += [[1.0, torch.nan], [torch.inf, 1.0], [3.0, -torch.inf], [torch.inf, -torch.inf, torch.nan]]
    padded = torch.tensor([row + [0.0] * (16 - len(row)) for row in rows])
    qkv = torch.cat((torch.zeros(1, 16), padded.view(1, -1), padded.flip(0).view(1, -1)), dim=1)
    caches = caches_of(shape, torch.int8)
    module.rotate_and_store(qkv, POSITIONS[:1], None, *caches, SLOTS[:1])
    for cache, given in zip(caches, (padded, padded.flip(0)), strict=True):
        got, want = vectors(cache)[SLOTS[0]], encode(given, torch.int8).view(torch.uint8)
        finite = given.isfinite().all(-1)
        assert torch.equal(got[finite], want[finite])
        assert torch.equal(got[:, :16], want[:, :16])
        assert decode(got[~finite].view(torch.int8)).isnan().all()


def check_far_slots(module: ModuleType) -> None:
    """Blocks beyond element number 2³¹ of a cache."""
    shape, block_size = Shape(16, None, 1, 2), 16
    width = cached_width(16, torch.int8)
    blocks = 2**31 // (block_size * 2 * width) + 3
    caches = untouched((2, blocks, block_size, 2, width), torch.int8)
    qkv, at = qkv_of(shape, rows=2), [blocks * block_size - 3, (blocks - 2) * block_size + 1]
    module.rotate_and_store(qkv, POSITIONS[:2], None, caches[0], caches[1], torch.tensor(at))
    for number, cache in enumerate(caches):
        want = encode(split(shape, qkv)[number + 1], torch.int8).view(torch.uint8)
        for row, slot in enumerate(at):
            block = cache[slot // block_size :][:1]
            assert torch.equal(vectors(block)[slot % block_size], want[row])
