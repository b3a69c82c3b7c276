"""Floats as integers of the same order, and candidates of a race as one int64, of which the largest wins."""

from __future__ import annotations

import triton
import triton.language as tl

INFINITE = tl.constexpr(0x7F800000)  # the key of +inf; NaN has the largest key of all
LOWEST = tl.constexpr(-0x7F800001)  # the key of -inf
LARGEST_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def key_of(x):
    """int32 keys in the order of float32 x; -0 is 0, and NaN comes above everything, as for torch's max."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, tl.where(x == 0.0, 0, key), 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(key):
    """Whether a key is that of a finite float."""
    return (key > LOWEST) & (key < INFINITE)


@triton.jit
def candidate(x, token):
    """int64: the larger x is the larger, and among equal ones the lower token id (int32, not negative)."""
    return (key_of(x).to(tl.int64) << 32) | (token ^ LARGEST_ID).to(tl.int64)


@triton.jit
def token_of(candidate):
    """The int32 token id of a candidate."""
    return (candidate & LARGEST_ID).to(tl.int32) ^ LARGEST_ID


@triton.jit
def distance(top, x, temperature):
    """How far x is below the top, in units of the temperature: rounded as the reference's, so that equal are equal."""
    return tl.div_rn(top - x, temperature)
