"""An exponential that gives every element the same bits wherever it stands in a tensor.

torch computes the last few elements of a tensor, and of each thread's share, with a scalar routine that may round
another way than the vector routine for the rest; the same value then gives other bits depending on its neighbours.
Multiplication, addition and rounding are exact to the last bit in both, so this is built from them alone.
"""

from __future__ import annotations

import torch

_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; the first has few bits, so n times it is exact
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOWEST, _HIGHEST = -87.3, 88.3  # outside, the result would leave the normal float32 numbers


def exp(x: torch.Tensor) -> torch.Tensor:
    """Give e to the power of x, float32 of any shape, within 2 units in the last place; below -87.3 gives 0.

    Method: Cephes' `expf` (range reduction by ln 2, a polynomial of degree 5).
    """
    clamped = x.clamp(_LOWEST, _HIGHEST)
    n = (clamped * _LOG2_E).round()
    r = clamped - n * _LN2_HIGH - n * _LN2_LOW
    y = torch.full_like(r, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        y = y * r + coefficient
    y = y * (r * r) + r + 1.0
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < _LOWEST, torch.zeros_like(x), y * power)
