"""Tables of rotary position embedding, and how their frequencies are stretched for longer texts.

The factors of the kinds that depend on a text's length, dynamic and longrope, are chosen once, for the longest text
that a runner takes. So a text's keys never have to be computed anew.
"""

from __future__ import annotations

import math

import torch

from ..config import RopeConfig


def rotary_table(rope: RopeConfig, head_dim: int, max_len: int) -> torch.Tensor:
    """Give float32 [max_len, rotary_dim]: at each position the cosines of rotary_dim/2 angles, then their sines.

    Both are multiplied with the configuration's attention factor.
    """
    rotary_dim = rope.rotary_dim(head_dim)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), _frequencies(rope, rotary_dim, max_len))
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def _frequencies(rope: RopeConfig, rotary_dim: int, max_len: int) -> torch.Tensor:
    """Radians a position, float32 [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    if rope.kind == "dynamic":
        return 1.0 / _dynamic_theta(rope, rotary_dim, max_len) ** exponents
    if rope.kind == "longrope":
        factors = rope.short_factor if max_len <= rope.original_max_position else rope.long_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return _yarn(rope, frequencies, rotary_dim) if rope.kind == "yarn" else frequencies


def _dynamic_theta(rope: RopeConfig, rotary_dim: int, max_len: int) -> float:
    """The base for texts of max_len tokens; the original one up to the original length."""
    longest = max(max_len, rope.original_max_position)
    stretch = rope.factor * longest / rope.original_max_position - (rope.factor - 1.0)
    return rope.theta * stretch ** (rotary_dim / (rotary_dim - 2))


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched, short ones kept, and in between the two are blended.

    Source: https://arxiv.org/abs/2407.21783
    """
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: RopeConfig, frequencies: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Waves that turn more than beta_fast times in the original length are kept, those below beta_slow stretched.

    In between the two are blended, along the number of the wave. Source: https://arxiv.org/abs/2309.00071
    """

    def number_of_wave(turns: float) -> float:
        return rotary_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = number_of_wave(rope.beta_fast), number_of_wave(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first or 0.001
    stretched = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return frequencies / rope.factor * stretched + frequencies * (1.0 - stretched)
