"""Faults in the kernel that norms, rotates and stores: each must turn a check of `rotary_checks` red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.support.mutations import Fault, assert_found
from tests.support.rotary_checks import (
    Shape,
    check_bytes,
    check_every_float8,
    check_floats,
    check_odd_int8,
    check_rounded,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of values that are meant not to be finite
SMALL, PARTLY = Shape(16, 16, 2, 3, "row"), Shape(10, 4, 3, 2, "head")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def floats(module: ModuleType) -> None:
    check_floats(module, SMALL, torch.float32)
    check_floats(module, PARTLY, torch.float32)


def rounded(module: ModuleType) -> None:
    for dtype in (torch.int8, E4M3, E5M2):
        check_rounded(module, PARTLY, dtype)


def stored(module: ModuleType) -> None:
    for dtype in (torch.int8, E4M3, E5M2):
        check_bytes(module, replace(SMALL, rotary_dim=None, norm="none"), dtype)


def odd(module: ModuleType) -> None:
    check_every_float8(module, E4M3)
    check_every_float8(module, E5M2)
    check_odd_int8(module)


FAULTS = [
    (floats, Fault("rotary", "mean + eps", "mean")),
    (floats, Fault("rotary", "tl.sum(square, 0)[None, :] / (count * HEAD_DIM)", "square / HEAD_DIM")),
    (floats, Fault("rotary", "cos_sin_ptr, key_weight_ptr", "cos_sin_ptr, query_weight_ptr")),
    (floats, Fault("rotary", "cos_sin_ptr, query_weight_ptr", "cos_sin_ptr, key_weight_ptr")),
    (floats, Fault("rotary", "first * cos - second * sin", "first * cos + second * sin")),
    (floats, Fault("rotary", "first * cos - second * sin", "first * sin - second * cos")),
    (floats, Fault("rotary", "        first = turned\n", "")),
    (
        floats,
        Fault("rotary", "cos_sin_ptr, 0, 1, HEAD_DIM, HALF,", "cos_sin_ptr, 0, 1, HEAD_DIM, 0,"),
    ),
    (floats, Fault("rotary", "tl.load(positions_ptr + row)", "row")),
    (floats, Fault("rotary", "slot % BLOCK_SIZE", "(slot + 1) % BLOCK_SIZE")),
    (floats, Fault("rotary", "slot // BLOCK_SIZE", "slot // (2 * BLOCK_SIZE)")),
    (floats, Fault("rotary", "tl.where(slot >= 0, KV_HEADS, 0)", "KV_HEADS")),
    (floats, Fault("rotary", "BLOCK_SIZE * HEAD_DIM,\n    )  # fmt: skip", "HEAD_DIM,\n    )  # fmt: skip")),
    (floats, Fault("rotary", "v_cache_ptr, kv", "k_cache_ptr, kv")),
    (floats, Fault("rotary", "inside = (head < count)", "inside = (head <= count)")),
    (floats, Fault("rotary", "column < HEAD_DIM - 2 * HALF", "column < HEAD_DIM - 2 * HALF - 1")),
    (floats, Fault("rotary", "column < HEAD_DIM - 2 * HALF", "column < HEAD_DIM - 2 * HALF + 1")),
    (rounded, Fault("rotary", "kv_scales_ptr += KV_HEADS", "kv_scales_ptr += 0")),
    (rounded, Fault("rotary", "largest_size(rest), 0.0,", "0.0, 0.0,")),
    (rounded, Fault("rotary", "tl.maximum(largest, largest_size(first)", "tl.maximum(largest, 0.0")),
    (rounded, Fault("rotary", "tl.maximum(largest, largest_size(second)", "tl.maximum(largest, 0.0")),
    (stored, Fault("rotary", "tl.load(scales_ptr + head, mask=head < KV_HEADS, other=1.0)", "1.0")),
    (stored, Fault("rotary", "tl.load(scales_ptr + head,", "tl.load(scales_ptr + head * 0,")),
    (stored, Fault("rotary", "tl.div_rn(largest, INT8_LARGEST)", "largest")),
    (stored, Fault("rotary", "(cache_ptr + VALUES)", "(cache_ptr + VALUES - 4)")),
    (stored, Fault("rotary", " * INT8_SCALE_BYTES", " * 0")),
    (stored, Fault("encode", "tl.div_rn(values, by)", "values * by", times=2)),
    (stored, Fault("encode", "(steps + _TO_WHOLE) - _TO_WHOLE", "steps")),
    (odd, Fault("encode", "(steps + _TO_WHOLE) - _TO_WHOLE", "tl.floor(steps + 0.5)")),
    (odd, Fault("encode", "tl.where(finite, code, 0x7F)", "code")),
    (odd, Fault("encode", "tl.minimum(tl.where(finite, size, 0.0), _E5M2_LARGEST)", "tl.where(finite, size, 0.0)")),
    (odd, Fault("encode", "(size + step) - step", "size")),
    (odd, Fault("encode", "tl.maximum(power, _E5M2_LEAST)", "power")),
    (odd, Fault("encode", 'tl.where(tl.abs(scaled) < float("inf"), inside, float("nan"))', "inside")),
    (odd, Fault("encode", " + 0.0 * tl.sum(part, 1)", "")),
]


@pytest.mark.parametrize(("check", "fault"), FAULTS, ids=[str(fault) for _, fault in FAULTS])
def test_each_fault_is_found(check: Callable[[ModuleType], None], fault: Fault) -> None:
    assert_found(fault, check, "rotary")
