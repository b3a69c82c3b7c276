"""The decoder of every architecture in `families`: attention and gated feed-forward, each added to a residual.

    norms before  residual += scale · branch(norm(residual))
    norms after   residual += norm(branch(residual))
    norms around  residual += norm(branch(norm(residual)))

Source of the layout: https://arxiv.org/abs/2302.13971; of norms after: https://arxiv.org/abs/2501.00656; of norms
around and of the caps: https://arxiv.org/abs/2408.00118
"""

from __future__ import annotations

import torch

from ...kernels.experts import Mixture
from ...kernels.forward import Forward, T
from ...kernels.matrix import Matrix
from ...kernels.rotary import QueryKeyNorm, Rotation
from ..config import ModelConfig
from ..weights import DecoderWeights, LayerWeights


class Decoder:
    """Describes how a step's token ids become hidden states. Holds no state but its weights.

    The keys and values live in the cache of whoever does the operations.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        # a root that is no bfloat16 number is rounded to one by its own model as well
        scale = torch.tensor(config.embedding_scale)
        self._embedding_scale = float(scale.to(weights.embedding.dtype) if config.family.scaled_embedding else scale)

    def describe(self, ops: Forward[T]) -> T:
        """Call the operations of one pass; give the final norm's output, [rows, hidden]."""
        weights = self.weights
        residual = ops.embedding(weights.embedding, self._embedding_scale)
        first = weights.layers[0].input_norm
        x = residual if first is None else ops.rms_norm(residual, first, self.config.rms_norm_eps)
        for number, layer in enumerate(weights.layers):
            attended = self._after(ops, self._attention(ops, x, layer, number), layer.attended_norm)
            x, residual = self._join(ops, attended, residual, layer.mlp_norm)
            fed = self._after(ops, self._feed_forward(ops, x, layer), layer.fed_norm)
            last = number + 1 == len(weights.layers)
            next_norm = weights.final_norm if last else weights.layers[number + 1].input_norm
            x, residual = self._join(ops, fed, residual, next_norm)
        return x

    def _attention(self, ops: Forward[T], x: T, layer: LayerWeights, number: int) -> T:
        config, kind = self.config, self.config.layers[number]
        norm = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norm = QueryKeyNorm(layer.query_norm, layer.key_norm, config.rms_norm_eps)
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        query = ops.rotate_and_store(qkv, number, Rotation(kind.rope, norm))
        seen = ops.paged_attention(query, number, config.scale, kind.window, config.soft_cap, layer.sinks)
        return self._added(ops, seen, layer.out, layer.out_bias)

    def _feed_forward(self, ops: Forward[T], x: T, layer: LayerWeights) -> T:
        if layer.router is not None and (kind := self.config.experts) is not None:
            biases = layer.gate_up_bias, layer.down_bias
            mixture = Mixture(layer.gate_up, layer.down, kind.top_k, kind.normalised, *biases, kind.clamp)
            return ops.experts(x, ops.linear(x, layer.router, layer.router_bias), mixture)
        gate_up = ops.linear(x, layer.gate_up, layer.gate_up_bias)
        gated = ops.gelu_mul(gate_up) if self.config.activation == "gelu" else ops.silu_mul(gate_up)
        return self._added(ops, gated, layer.down, layer.down_bias)

    def _added(self, ops: Forward[T], x: T, weight: Matrix, bias: torch.Tensor | None) -> T:
        """The last product of a branch, as large as it is to be added."""
        return ops.linear(x, weight, bias, self.config.residual_scale)

    def _after(self, ops: Forward[T], branch: T, norm: torch.Tensor | None) -> T:
        return branch if norm is None else ops.rms_norm(branch, norm, self.config.rms_norm_eps)

    def _join(self, ops: Forward[T], branch: T, residual: T, norm: torch.Tensor | None) -> tuple[T, T]:
        """Add a branch; give what the next one begins with, and the sum."""
        if norm is not None:
            return ops.add_rms_norm(branch, residual, norm, self.config.rms_norm_eps)
        total = ops.add(branch, residual)
        return total, total
