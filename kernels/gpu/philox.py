"""Random words and Gumbel noise inside of kernels: the words of `..philox` bit for bit, noise in float32.

How exact the noise is. A word w stands for the uniform u = (w + 1/2) / 2³². -log1p(-u) is taken from u itself where u
is small, from 1 - u elsewhere, and 1 - u from the word's complement: nothing is lost at either end. The noise
-log(-log1p(-u)) is then exact to 2⁻²² + 2⁻²³ · |noise|; measured over 2²⁴ words: 0.71 of that. It is finite for every
word: from -3.13 (w = 2³² - 1, where u itself would round to 1) to 22.88 (w = 0).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox_words(place, seed, choice, position):
    """Four uint32 words for each place: those of the tokens at (place // 16) · 64 + place % 16 + 16 · (0, 1, 2, 3).

    place is int32 of any shape, seed an int64 scalar, choice and position int32 scalars with the low 32 bits.
    """
    return tl.philox(seed, place, position, choice, position * 0)


@triton.jit
def token_word(token, seed, choice, position):
    """One uint32 word for each int32 token id."""
    first, second, third, fourth = philox_words(token // 64 * 16 + token % 16, seed, choice, position)
    lane = token % 64 // 16
    return tl.where(lane < 2, tl.where(lane == 0, first, second), tl.where(lane == 2, third, fourth))


@triton.jit
def _split(x):
    """Whole k and m in [√½, √2) with x = m · 2ᵏ, for normal x > 0; k as float32."""
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23  # the bits of √½
    return k.to(tl.float32), (bits - (k << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _log1p(f):
    """log(1 + f) for f in [√½ - 1, √2 - 1], relatively exact to 2⁻²³. Polynomial: S. Moshier's Cephes, `logf`."""
    p = 7.0376836292e-2
    p = p * f - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    square = f * f
    return f + (square * f * p - 0.5 * square)


@triton.jit
def _join(k, log_m):
    """k · log(2) + log_m, with log(2) in two parts, the first of which times any k is exact."""
    return k * 0.693359375 + (k * -2.12194440e-4 + log_m)


@triton.jit
def natural_log(x):
    """log(x) of float32 x > 0, not denormal, to 2⁻²³ of itself near 1 and to 2⁻²³ · |log(x)| + 2⁻²⁴ elsewhere."""
    k, m = _split(x)
    return _join(k, _log1p(m - 1.0))


@triton.jit
def gumbel(word):
    """Gumbel noise, float32, for uint32 words."""
    rest = ((~word).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u, exact enough where it is small
    uniform = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    k, m = _split(rest)
    exponential = -_join(k, _log1p(tl.where(k == 0.0, -uniform, m - 1.0)))
    return -natural_log(exponential)
