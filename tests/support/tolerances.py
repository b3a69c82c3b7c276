"""How far a kernel may be from a float64 reference of the same inputs, by the type of its result.

Kernels compute in float32 (unit roundoff 2⁻²⁴) and round once to the type of the result:

* rounding the result: half a unit in the last place, 2⁻²⁴ of the value in float32, 2⁻⁸ in bfloat16;
* rounding inside: a sum of n products loses about sqrt(n) · 2⁻²⁴ of the largest partial sum. The largest n in these
  tests is 300 keys or 3,072 inputs, and a softmax multiplies the error of its exponents, of up to 8, into the result:
  64 · 2⁻²⁴ of the largest value covers both with a factor of two to spare (measured: 2.5e-7, which is 4 · 2⁻²⁴).
* operations that round twice in the result's type (a residual sum before a norm) get the rounding of the type twice.
"""

from __future__ import annotations

import os

import torch

INSIDE = 64 * 2.0**-24  # of the largest value
RESULT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of each value


FOUND: dict[str, dict[str, float]] = {}  # the largest errors by test file and type, as shares of the largest value


def _remember(got: torch.Tensor, want: torch.Tensor) -> None:
    largest = want.abs().max().item() if want.numel() else 0.0
    file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0].rpartition("/")[2]
    if largest > 0 and file and "mutations" not in file and "faults" not in file:
        of_file, dtype = FOUND.setdefault(file.removesuffix(".py"), {}), str(got.dtype).removeprefix("torch.")
        error = (got.double() - want).abs().max().item() / largest
        of_file[dtype] = max(error, of_file.get(dtype, 0.0))


def assert_close(got: torch.Tensor, want: torch.Tensor, roundings: int = 1, slack: torch.Tensor | None = None) -> None:
    """Compare a result with its float64 reference, element by element; NaN anywhere fails.

    slack, of want's shape: what operands that are themselves rounded may add, as the test derives it.
    """
    assert got.shape == want.shape, f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    assert torch.isfinite(got).all(), f"{(~torch.isfinite(got)).sum()} of {got.numel()} values are not finite"
    want = want.double()
    allowed = roundings * RESULT[got.dtype] * want.abs() * 1.01 + INSIDE * want.abs().max()
    if slack is not None:
        allowed = allowed + slack * 1.01
    excess = ((got.double() - want).abs() - allowed).max().item() if got.numel() else 0.0
    assert excess <= 0, f"off by {(got.double() - want).abs().max():.3g} at values up to {want.abs().max():.3g}"
    _remember(got, want if slack is None else torch.where(slack < want.abs(), want, got.double()))
