"""Matrix products, and the row counts at which a product gives each row the same bits."""

from __future__ import annotations

import torch
from torch.nn import functional

from .matrix import Matrix

ROW_MULTIPLES = (4, 8, 16, 32, 64)


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
    """Give (x · weightᵀ + bias) · scale: x [rows, inputs], weight [outputs, inputs], bias [outputs] or None.

    All of one dtype; `scale` is applied in float32. torch rounds its products to bfloat16 before, ours do not. A row's
    bits do not depend on the other rows as long as the number of rows is a multiple of `row_multiple`.
    """
    product = functional.linear(x, weight.plain, bias)
    return product if scale == 1.0 else (product.float() * scale).to(x.dtype)


def padded_rows(rows: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that holds `rows` rows, at least one multiple."""
    return max(1, -(-rows // multiple)) * multiple


def any_rows(matrix: Matrix) -> int:
    """The row count to pad to where padding is not wanted: a row's bits are its own, or no padding makes them so."""
    del matrix
    return 1


def row_multiple(matrix: Matrix) -> int:
    """The row count to pad to, so that torch's products with a matrix like this one give a row the same bits always.

    Found by trying, because it is a property of the library underneath: MKL's float32 products compute up to three
    rows, and shares of up to three rows of a thread, by another routine than four and more (the same for 1 to 16
    threads and for inner sizes of 16 to 14,336); oneDNN's bfloat16 products do not mind. Takes a few milliseconds,
    and holds for the number of threads set when it is called.

    Raises:
        ArithmeticError: no row count up to 64 keeps a row's bits here.
    """
    inputs, weight = matrix.inputs, matrix.plain
    sample = weight[: 64 + len(weight) % 64].contiguous()  # an odd number of outputs stays odd
    x = torch.randn((192, inputs), generator=torch.Generator().manual_seed(0)).to(weight)
    whole = functional.linear(x, sample)
    for multiple in ROW_MULTIPLES:
        counts = [n for n in (multiple, 2 * multiple, 3 * multiple, 5 * multiple, 7 * multiple) if n < len(x)]
        if all(torch.equal(functional.linear(x[3 : 3 + n], sample), whole[3 : 3 + n]) for n in counts):
            return multiple
    raise ArithmeticError("matrix products give a row other bits for every number of rows beside it")
