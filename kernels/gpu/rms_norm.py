"""Root-mean-square norm, plain and with the residual sum before it. A sum alone is torch's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .shapes import power_of_two

_TILE = 1024  # values of a program, unless one row has more
_PER_THREAD = 16
_MOST_WARPS = 16


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    eps,
    rows,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Norm of x, or of x + residual, which is stored in total. grid: (ceil(rows / ROWS)).

    x, residual, normed, total [rows, HIDDEN] of one type, residual and total None where x stands alone; weight float32
    [HIDDEN]. A program has ROWS whole rows, each in COLUMNS ≥ HIDDEN columns.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < HIDDEN)
    at = row * HIDDEN + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total = (x + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + at, total, mask=inside)
        x = total.to(tl.float32)  # the norm is of the sum as it was rounded
    mean = tl.sum(x * x, 1) / HIDDEN
    weight = tl.load(weight_ptr + column, mask=column < HIDDEN, other=0.0)
    normed = x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None] * weight
    tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm.rms_norm`: x [rows, hidden] float32, bfloat16 or float16; weight float32 [hidden].

    A row's bits depend on nothing but the row. Tensors that do not begin at a multiple of 16 bytes are compiled for
    once more, and may be summed in another order.
    """
    return _launched(x, None, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm.add_rms_norm`: residual is of x's shape and type; otherwise as `rms_norm`, in one launch."""
    return _launched(x, residual, weight, eps)


def _launched(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm, and what it is of."""
    x = x.contiguous()
    rows, hidden = x.shape
    columns = power_of_two(hidden)
    together = max(1, _TILE // columns)
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    if rows:
        warps = min(_MOST_WARPS, max(1, together * columns // (32 * _PER_THREAD)))
        _rms_norm_rows[(triton.cdiv(rows, together),)](
            x,
            None if residual is None else residual.contiguous(),
            weight,
            normed,
            None if residual is None else total,
            eps,
            rows,
            HIDDEN=hidden,
            ROWS=together,
            COLUMNS=columns,
            num_warps=warps,
        )
    return normed, total
