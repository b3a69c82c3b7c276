"""The gated activations of the feed-forward layer, see `gated` in the folder above."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from ..gated import Clamp
from .shapes import power_of_two

_MOST_COLUMNS, _WARPS = 1024, 4
_TWO_ROOTS = tl.constexpr(1.5957691216057308)  # 2 · sqrt(2 / π)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _gated(
    gate_up_ptr,
    out_ptr,
    alpha,
    limit,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out = activation(gate) · up. grid: (rows, ceil(WIDTH / COLUMNS)).

    gate_up [rows, 2·WIDTH], out [rows, WIDTH] of one type; alpha and limit are those of the kind "clamped".
    Each kind is gate / (1 + exp(…)): where exp is infinite that is 0, and nowhere does infinity meet 0 or itself.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    at = gate_up_ptr + row * (2 * WIDTH) + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        exponent = -gate
    elif KIND == "gelu":
        exponent = gate * (gate * gate * (-_TWO_ROOTS * _CUBIC) - _TWO_ROOTS)
    else:
        gate = tl.where(gate > limit, limit, gate)  # unlike a minimum, leaves NaN
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        exponent = -alpha * gate
    out = gate / (1.0 + tl.exp(exponent)) * up
    tl.store(out_ptr + row * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gated.silu_mul`: gate_up [rows, 2·width] float32, bfloat16 or float16."""
    return _launched(gate_up, "silu", 0.0, 0.0)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gated.gelu_mul`: gate_up as in `silu_mul`."""
    return _launched(gate_up, "gelu", 0.0, 0.0)


def clamped_mul(gate_up: torch.Tensor, clamp: Clamp) -> torch.Tensor:
    """`gated.clamped_mul`: gate_up as in `silu_mul`."""
    return _launched(gate_up, "clamped", clamp.alpha, clamp.limit)


def _launched(
    gate_up: torch.Tensor, kind: Literal["silu", "gelu", "clamped"], alpha: float, limit: float
) -> torch.Tensor:
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    columns = min(_MOST_COLUMNS, power_of_two(width))
    if rows:
        _gated[(rows, triton.cdiv(width, columns))](
            gate_up.contiguous(), out, alpha, limit, WIDTH=width, KIND=kind, COLUMNS=columns, num_warps=_WARPS
        )
    return out
