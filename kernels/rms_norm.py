"""Root-mean-square norm, plain and with the residual sum before it."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row to a root mean square of one, then by `weight`: x / sqrt(mean(x²) + eps) · weight.

    x [rows, hidden] and weight [hidden] share one dtype, which the result has as well; arithmetic is float32. The
    inputs are left alone. Source: https://arxiv.org/abs/1910.07467
    """
    wide = x.float()
    mean = (wide * wide).mean(-1, keepdim=True)
    return (wide * (1.0 / torch.sqrt(mean + eps)) * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give (`rms_norm(x + residual)`, `x + residual`), both new tensors of x's shape and dtype.

    The norm is taken of the sum as it is rounded to x's dtype, so that the two results belong together.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
