"""Root-mean-square norm, plain and with the residual sum before it, and that sum alone."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row to a root mean square of one, then by `weight`: x / sqrt(mean(x²) + eps) · weight.

    x [rows, hidden]; weight float32 [hidden]; the result has x's dtype; arithmetic is float32. The inputs are left
    alone. Source: https://arxiv.org/abs/1910.07467
    """
    return normed(x, weight, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give (`rms_norm(x + residual)`, `x + residual`), both new tensors of x's shape and dtype.

    The norm is taken of the sum as it is rounded to x's dtype, so that the two results belong together.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total


def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Give x + residual, a new tensor; both are [rows, hidden] of one dtype."""
    return x + residual


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` over the last dimension of x [..., hidden], in float32 and not rounded to x's dtype."""
    wide = x.float()
    mean = (wide * wide).mean(-1, keepdim=True)
    return wide * (1.0 / torch.sqrt(mean + eps)) * weight
