"""The gated activations of the feed-forward layer.

Each takes gate_up [rows, 2·width], where the gate is the first half of each row and up the second, and gives
[rows, width] of the same dtype; arithmetic is float32. Source: https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .exact import exp

Activation = Literal["silu", "gelu"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu")  # cpu/simd.cpp has the same
_TWO_ROOTS, _CUBIC = 1.5957691216057308, 0.044715  # the first is 2 · sqrt(2 / π)


@dataclass(frozen=True, slots=True)
class Clamp:
    """What `clamped_mul` bends with."""

    alpha: float  # steepness of the sigmoid
    limit: float  # above 0: the gate's most, and what up may be away from 0


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Give silu(gate) · up."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + exp(-gate)) * up).to(gate_up.dtype)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Give gelu(gate) · up, in gelu's approximation by tanh: gate · (1 + tanh u) / 2 = gate / (1 + exp(-2u)).

    There u = sqrt(2 / π) · (gate + 0.044715 · gate³). Source: https://arxiv.org/abs/1606.08415
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + exp(gate * (gate * gate * (-_TWO_ROOTS * _CUBIC) - _TWO_ROOTS))) * up).to(gate_up.dtype)


def clamped_mul(gate_up: torch.Tensor, clamp: Clamp) -> torch.Tensor:
    """Give gate · sigmoid(alpha · gate) · (up + 1), where the gate is at most the limit and up within ± the limit.

    Source: https://arxiv.org/abs/2508.10925
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (gate / (1.0 + exp(-clamp.alpha * gate)) * (up + 1.0)).to(gate_up.dtype)
