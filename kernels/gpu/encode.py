"""How a kernel brings values into the cache's type, as `kv_layout.encode` does, bit for bit.

For that its launch says enable_fp_fusion=False: a product must be rounded before something is added to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kv_layout import FLOAT8_LARGEST, LARGEST, SCALE_BYTES

INT8_LARGEST = tl.constexpr(float(LARGEST))
INT8_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_E4M3_LARGEST = tl.constexpr(FLOAT8_LARGEST[torch.float8_e4m3fn])
_E5M2_LARGEST = tl.constexpr(FLOAT8_LARGEST[torch.float8_e5m2])
_TO_WHOLE = tl.constexpr(1.5 * 2.0**23)  # added and taken away again, rounds to an integer, half to even
_E5M2_LEAST = tl.constexpr(2.0**-14)  # of the numbers with all bits
_E5M2_ROUND = tl.constexpr(1.5 * 2.0**21)  # as _TO_WHOLE, to two bits behind the first


@triton.jit
def largest_size(part):
    """Of each head the largest size of a value, [heads, 1], NaN where not all are finite."""
    return (tl.max(tl.abs(part), 1) + 0.0 * tl.sum(part, 1))[:, None]


@triton.jit
def _float8_e5m2(values):
    """Round float32 values; NaN where they are not finite. Older GPUs cannot, and through float16 would round twice."""
    bits = values.to(tl.uint32, bitcast=True)
    size = tl.abs(values)
    finite = size < float("inf")
    size = tl.minimum(tl.where(finite, size, 0.0), _E5M2_LARGEST)
    power = (size.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, _E5M2_LEAST) * _E5M2_ROUND
    rounded = ((size + step) - step).to(tl.float16)  # exact, and the upper byte is the result
    code = (rounded.to(tl.uint16, bitcast=True) >> 8) | ((bits >> 24) & 0x80).to(tl.uint16)
    return tl.where(finite, code, 0x7F).to(tl.uint8).to(tl.float8e5, bitcast=True)


@triton.jit
def encoded(values, by, KIND: tl.constexpr):
    """Float32 values [heads, block] in the cache's type, by a factor (int8) or a divisor (float8) of each head."""
    if KIND == tl.int8:
        steps = values * by
        steps = tl.where(tl.abs(steps) >= 0.0, steps, 0.0)  # without NaN
        steps = tl.minimum(tl.maximum(steps, -INT8_LARGEST), INT8_LARGEST)
        encoded = ((steps + _TO_WHOLE) - _TO_WHOLE).to(tl.int8)
    elif KIND == tl.float8e5:
        encoded = _float8_e5m2(tl.div_rn(values, by))
    elif KIND == tl.float8e4nv:
        scaled = tl.div_rn(values, by)
        inside = tl.minimum(tl.maximum(scaled, -_E4M3_LARGEST), _E4M3_LARGEST)
        encoded = tl.where(tl.abs(scaled) < float("inf"), inside, float("nan")).to(KIND)
    else:
        encoded = values.to(KIND)
    return encoded
