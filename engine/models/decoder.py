"""A decoder of the Llama family: norm, attention, norm, gated feed-forward, each added to a residual.

Source of the layout: https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783 (scaling of the rotary
frequencies)
"""

from __future__ import annotations

import math

import torch

from ...kernels.backend import Backend
from ..batch import Batch
from ..config import ModelConfig, RopeConfig
from ..weights import DecoderWeights, LayerWeights


class Decoder:
    """Turns a batch into hidden states, and hidden states into scores. Holds no state but its weights.

    The keys and values live in the cache that `forward` is given and writes.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, backend: Backend, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self.ops = backend
        self.cos_sin = rotary_table(config.rope, config.head_dim, max_model_len).to(weights.embedding.device)

    def forward(self, batch: Batch, cache: torch.Tensor) -> torch.Tensor:
        """Compute the batch's tokens and write their keys and values.

        cache is [layers, 2, num_blocks, block_size, kv_heads, head_dim], keys first. Result: the final norm's output,
        [batch.num_rows, hidden]; rows from batch.num_tokens on are padding.
        """
        ops, weights, eps = self.ops, self.weights, self.config.rms_norm_eps
        residual = ops.embedding(batch.token_ids, weights.embedding)
        normed = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
        for number, layer in enumerate(weights.layers):
            attended = self._attention(normed, layer, batch, cache[number, 0], cache[number, 1])
            normed, residual = ops.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            gated = ops.silu_mul(ops.linear(normed, layer.gate_up, layer.gate_up_bias))
            last = number + 1 == len(weights.layers)
            next_norm = weights.final_norm if last else weights.layers[number + 1].input_norm
            normed, residual = ops.add_rms_norm(
                ops.linear(gated, layer.down, layer.down_bias), residual, next_norm, eps
            )
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Give float32 scores [rows, vocab] for hidden states [rows, hidden]."""
        return self.ops.logits(hidden, self.weights.output)

    def _attention(
        self, x: torch.Tensor, layer: LayerWeights, batch: Batch, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        ops = self.ops
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        query = ops.rotate_and_store(qkv, batch.positions, self.cos_sin, keys, values, batch.slots)
        seen = ops.paged_attention(query, keys, values, batch.paging, self.config.scale)
        return ops.linear(seen.view(len(x), -1), layer.out, layer.out_bias)


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
