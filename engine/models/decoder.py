"""A decoder of the Llama family: norm, attention, norm, gated feed-forward, each added to a residual.

Source of the layout: https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783 (scaling of the rotary
frequencies)
"""

from __future__ import annotations

import math

import torch

from ...kernels.forward import Forward, T
from ..config import ModelConfig, RopeConfig
from ..weights import DecoderWeights, LayerWeights


class Decoder:
    """Describes how a step's token ids become hidden states. Holds no state but its weights.

    The keys and values live in the cache of whoever does the operations.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights

    def describe(self, ops: Forward[T]) -> T:
        """Call the operations of one pass; give the final norm's output, [rows, hidden]."""
        weights, eps = self.weights, self.config.rms_norm_eps
        residual = ops.embedding(weights.embedding)
        normed = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
        for number, layer in enumerate(weights.layers):
            attended = self._attention(ops, normed, layer, number)
            normed, residual = ops.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            gated = ops.silu_mul(ops.linear(normed, layer.gate_up, layer.gate_up_bias))
            fed = ops.linear(gated, layer.down, layer.down_bias)
            last = number + 1 == len(weights.layers)
            next_norm = weights.final_norm if last else weights.layers[number + 1].input_norm
            normed, residual = ops.add_rms_norm(fed, residual, next_norm, eps)
        return normed

    def _attention(self, ops: Forward[T], x: T, layer: LayerWeights, number: int) -> T:
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        query = ops.rotate_and_store(qkv, number)
        seen = ops.paged_attention(query, number, self.config.scale)
        return ops.linear(seen, layer.out, layer.out_bias)


def rotary_table(rope: RopeConfig, head_dim: int, max_len: int) -> torch.Tensor:
    """Give float32 [max_len, head_dim]: at each position the cosines of head_dim/2 angles, then their sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), _scaled(1.0 / rope.theta**exponents, rope))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _scaled(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Stretch the frequencies as the configuration says."""
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    # llama3: long waves are stretched, short ones kept, and in between the two are blended
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / rope.factor + kept * frequencies
