"""Compressed panels hold every bit of the whole ones, in three quarters of the memory, and give the same products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.backend import open_library
from headrace.kernels.cpu.build import cpu_features
from headrace.kernels.cpu.library import CpuLibrary
from headrace.kernels.matrix import PANEL, Matrix, plain_matrix

HEAD, STEP = 64, 192  # bytes of a panel's head and of a step; cpu/compressed.h has the same
VALUES_FOR_EXCEPTION = 1024

pytestmark = pytest.mark.skipif(
    not {"avx512_bf16", "avx512bw"} <= set(cpu_features().split()),
    reason="this CPU has no products of bfloat16 that read compressed panels",
)


@pytest.fixture(scope="module")
def library() -> CpuLibrary:
    made = open_library()
    assert isinstance(made, CpuLibrary)
    return made


def normal(*shape: int, seed: int = 0, scale: float = 0.04) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def both(library: CpuLibrary, weight: torch.Tensor) -> tuple[Matrix, Matrix]:
    """The matrix in whole panels, and compressed where that is worth it."""
    whole = library.pack(plain_matrix(weight))
    return whole, library.compressed(library.pack(plain_matrix(weight)))


def read(matrix: Matrix) -> np.ndarray:
    """What a compressed matrix holds, uint16 [outputs, inputs], by the form's description."""
    panels, steps = -(-matrix.outputs // PANEL), matrix.inputs // 2
    raw, size = matrix.values.numpy(), HEAD + STEP * steps
    heads, body = np.split(raw[: panels * size].reshape(panels, size), [HEAD], axis=1)
    body = body.reshape(panels, steps, STEP)
    numbers = np.concatenate([body[:, :, 128:] & 15, body[:, :, 128:] >> 4], axis=2)
    upper = np.take_along_axis(heads[:, None, :16], numbers.astype(np.int64), axis=2).astype(np.uint16)
    values = body[:, :, :128] | upper << 8
    # eight values of one vector, then eight of the next, in each quarter of both pairs of vectors
    values = values.reshape(panels, steps, 2, 4, 2, 8).transpose(0, 1, 2, 4, 3, 5).reshape(panels, steps, 128).copy()
    exceptions = raw[panels * size :].view(np.dtype([("step", "<u4"), ("place", "<u2"), ("value", "<u2")]))
    for panel, (first, count) in enumerate(heads[:, 16:24].copy().view("<u4")):
        for one in exceptions[first : first + count]:
            values[panel, one["step"], one["place"]] = one["value"]
    whole = values.reshape(panels, steps, PANEL, 2).transpose(0, 2, 1, 3).reshape(panels * PANEL, -1)
    return whole[: matrix.outputs]


def same_products(library: CpuLibrary, whole: Matrix, compressed: Matrix, counts: tuple[int, ...]) -> None:
    for rows in counts:
        x = normal(rows, whole.inputs, seed=rows, scale=1.0)
        bias = normal(whole.outputs, seed=1)
        assert np.array_equal(bits(library.linear(x, whole)), bits(library.linear(x, compressed))), rows
        assert np.array_equal(bits(library.linear(x, whole, bias)), bits(library.linear(x, compressed, bias))), rows
        if whole.outputs % (2 * PANEL) == 0:
            gated = [library.linear_gated(x, matrix, bias, "silu") for matrix in (whole, compressed)]
            assert np.array_equal(bits(gated[0]), bits(gated[1])), rows


@pytest.mark.parametrize("shape", [(64, 576), (960, 576), (576, 1536), (256, 64), (200, 2050), (100, 1022), (2, 4096)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_bit_is_kept_and_products_are_the_same(library: CpuLibrary, shape: tuple[int, int], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight = normal(*shape)
        whole, compressed = both(library, weight)
        assert compressed.compressed == (shape[0] > 48)  # two rows would be filled up to a panel
        if compressed.compressed:
            assert np.array_equal(read(compressed), bits(weight))
        same_products(library, whole, compressed, (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 22, 64, 97, 200))
    finally:
        torch.set_num_threads(before)


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.integers(49, 330),
    pairs=st.integers(2, 400),
    odd=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 0xFFFF)), max_size=60),
    seed=st.integers(0, 1000),
)
def test_weights_of_any_bits_are_kept(outputs: int, pairs: int, odd: list[tuple[float, int]], seed: int) -> None:
    library = open_library()
    assert isinstance(library, CpuLibrary)
    weight = normal(outputs, 2 * pairs, seed=seed)
    flat = bits(weight).reshape(-1)
    for place, value in odd:  # zeros, subnormal numbers, infinities, NaN among them
        flat[int(place * (flat.size - 1))] = value
    whole, compressed = both(library, weight)
    if compressed.compressed:
        assert np.array_equal(read(compressed), bits(weight))
        assert compressed.num_bytes < weight.nbytes
    rows = normal(5, 2 * pairs, seed=1)
    for x in (rows[:1], rows):
        want, got = (library.linear(x, matrix) for matrix in (whole, compressed))
        assert np.array_equal(bits(want), bits(got))


def test_exceptions_stand_in_every_place(library: CpuLibrary) -> None:
    weight = normal(64, 1024)
    flat = bits(weight)
    for i in range(60):  # one below the most that there may be: 64 in 65,536 values
        flat[i, (i * 37) % 1024] = 0x0001 + i
    flat[:4, -1] = 0x7F80, 0xFF80, 0x0000, 0x8000  # in the last step, several at once
    whole, compressed = both(library, weight)
    assert compressed.compressed
    assert np.array_equal(read(compressed), flat)
    flat[0, -1], flat[1, -1] = 0x0100, 0x8100  # finite, so that the products tell
    whole, compressed = both(library, weight)
    same_products(library, whole, compressed, (1, 4, 6, 12, 13, 40))


def test_a_matrix_that_does_not_gain_stays_whole(library: CpuLibrary) -> None:
    wild = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 16, (128, 256), dtype=np.uint16).view(np.int16))
    cases = {
        "values of all sizes": wild.view(torch.bfloat16),
        "an odd number of inputs": normal(128, 255),
        "two inputs": normal(128, 2),
        "a panel that is mostly filled up": normal(65, 256)[:1],
        "float32": torch.randn(128, 256),
    }
    for name, weight in cases.items():
        whole, compressed = both(library, weight)
        assert not compressed.compressed, name
        assert torch.equal(compressed.values.view(torch.uint8), whole.values.view(torch.uint8)), name


def test_too_many_exceptions_are_not_compressed(library: CpuLibrary) -> None:
    for num_odd, is_worth_it in ((64, True), (65, False)):
        weight = torch.full((64, 1024), 1.0, dtype=torch.bfloat16)
        flat = bits(weight).reshape(-1)
        flat[: 64 * 1024] = np.tile(np.arange(16, dtype=np.uint16) << 8, 64 * 64)  # sixteen kinds, all equally often
        flat[:num_odd] = 0x4000
        assert both(library, weight)[1].compressed == is_worth_it
    assert VALUES_FOR_EXCEPTION == 64 * 1024 / 64


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def test_a_quarter_of_the_memory_is_given_back(library: CpuLibrary) -> None:
    before = resident_bytes()
    whole = library.pack(plain_matrix(normal(8192, 4096)))
    between = resident_bytes()
    made = library.compressed(whole)
    after = resident_bytes()
    assert made.compressed
    assert made.values.data_ptr() == whole.values.data_ptr()
    assert made.num_bytes == pytest.approx(0.75 * 8192 * 4096 * 2, rel=0.002)
    assert between - before > 60e6
    assert between - after > 15e6  # of 16.7 MB; the rest is what compressing needs besides


def test_only_products_take_a_compressed_matrix(library: CpuLibrary) -> None:
    _, compressed = both(library, normal(4096, 64))
    assert compressed.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="compressed"):
        library.embedding(torch.zeros(1, dtype=torch.int64), compressed)
    with pytest.raises(TypeError, match="compressed"):
        library.screened(compressed)
    with pytest.raises(TypeError, match="compressed"):
        library.compressed(compressed)
    with pytest.raises(ValueError, match="in panels"):
        _ = compressed.plain
    with pytest.raises(TypeError, match="in panels"):
        library.linear(normal(1, 64), replace(compressed, in_panels=False))
