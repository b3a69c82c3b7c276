"""The gated activation of the feed-forward layer."""

from __future__ import annotations

import torch

from .exact import exp


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Give silu(gate) · up, where gate is the first half of each row and up the second.

    gate_up [rows, 2·width] gives [rows, width] of the same dtype; arithmetic is float32. Source: https://arxiv.org/abs/2002.05202
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + exp(-gate)) * up).to(gate_up.dtype)
