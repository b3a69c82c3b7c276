"""Decoders of random weights on the device, without files, and runners on them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch

from headrace.engine.config import LayerConfig, ModelConfig
from headrace.engine.device import Device
from headrace.engine.device_runner import DeviceRunner
from headrace.engine.engine import Engine
from headrace.engine.families import FAMILIES
from headrace.engine.passes import DecoderPasses
from headrace.engine.rope import RopeConfig, RopeKind
from headrace.engine.runner import RunnerLimits
from headrace.engine.types import EngineConfig, Plan, RowResult, Runner
from headrace.engine.weights import allocate
from headrace.kernels.backend import Backend, open_backend
from headrace.kernels.linear import any_rows
from headrace.kernels.matrix import Matrix

from .ground import Ground

Kind = Literal["LlamaForCausalLM", "Qwen3ForCausalLM"]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A decoder's numbers, as a config.json has them."""

    name: str
    kind: Kind
    vocab: int
    hidden: int
    middle: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    theta: float = 500_000.0
    rope: RopeKind = "default"


LLAMA_8B = ModelSizes("Llama-3.1-8B", "LlamaForCausalLM", 128_256, 4096, 14_336, 32, 32, 8, 128, False, rope="llama3")
QWEN_06B = ModelSizes("Qwen3-0.6B", "Qwen3ForCausalLM", 151_936, 1024, 3072, 28, 16, 8, 128, True, theta=1e6)
SMALL = ModelSizes("small", "Qwen3ForCausalLM", 4096, 1024, 2048, 4, 8, 2, 128, False)
TINY = ModelSizes("tiny", "LlamaForCausalLM", 61, 32, 48, 1, 2, 1, 80, False)


def model_config(sizes: ModelSizes, max_position: int = 8192) -> ModelConfig:
    """The configuration that a checkpoint of such sizes would have."""
    rope = RopeConfig(sizes.rope, sizes.theta, factor=8.0, original_max_position=8192)
    return ModelConfig(
        architecture=sizes.kind,
        family=FAMILIES[sizes.kind],
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.middle,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position=max_position,
        rms_norm_eps=1e-5,
        ropes=(rope,),
        layers=tuple(LayerConfig() for _ in range(sizes.layers)),
        tie_word_embeddings=sizes.tied,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        dtype="bfloat16",
        eos_token_ids=frozenset(),
        scale=sizes.head_dim**-0.5,
    )


def random_passes(sizes: ModelSizes, dtype: torch.dtype, device: torch.device, ops: Backend) -> DecoderPasses:
    """A decoder whose projections keep the size of what goes through them, so that scores differ clearly."""
    config = model_config(sizes)
    weights, _ = allocate(config, dtype, device)
    random = torch.Generator(device).manual_seed(0)
    for layer in weights.layers:
        for name in type(layer).__slots__:
            part: Matrix | torch.Tensor | None = getattr(layer, name)
            if isinstance(part, Matrix):
                _fill(part, part.inputs**-0.5, random)
            elif part is not None:
                part.fill_(1.0)
    weights.final_norm.fill_(1.0)
    _fill(weights.embedding, 1.0, random)
    if weights.output is not weights.embedding:
        _fill(weights.output, 3.0 * sizes.hidden**-0.5, random)
    return DecoderPasses(config, weights, ops)


def _fill(matrix: Matrix, size: float, random: torch.Generator) -> None:
    matrix.plain.normal_(0.0, size, generator=random)


def backend(ground: Ground, dtype: torch.dtype) -> tuple[Backend, str]:
    """Our kernels, and what is to be said of torch's products beside them.

    Where these give a row other bits beside every other number of rows, no number of rows is asked for.
    """
    device = ground.device
    ops = ground.watched(open_backend("triton", device.type))
    probe = Matrix(torch.randn((256, 256), device=device).to(dtype), 256, 256)
    with suppress(ArithmeticError):
        return ops, f"rows are padded to a multiple of {ops.row_multiple(probe)}"
    return replace(ops, row_multiple=any_rows), "products give a row other bits beside other numbers of rows"


class OneByOne:
    """A `types.Runner` on a runner for devices: each step is waited for before the next one is begun."""

    def __init__(self, inner: DeviceRunner) -> None:
        self.vocab_size, self.eos_token_ids = inner.vocab_size, inner.eos_token_ids
        self.max_model_len, self.block_size = inner.max_model_len, inner.block_size
        self.num_blocks, self.num_window_blocks, self.window = inner.num_blocks, inner.num_window_blocks, inner.window
        self._inner = inner

    def run(self, plan: Plan) -> list[RowResult]:
        """See `types.Runner`."""
        flight = self._inner.begin(plan)
        flight.draw()
        return flight.finish()


def device_runner(
    model: DecoderPasses, line: Device, limits: RunnerLimits, *, graphs: bool, sharing: bool
) -> DeviceRunner:
    """A runner on a model; without `sharing` every sequence's blocks are read for itself."""
    ops = model.backend if sharing else replace(model.backend, sharing=None)
    return DeviceRunner(model, ops, limits, line, graphs=graphs)


def engine_on(runner: DeviceRunner, limits: RunnerLimits, *, overlap: bool) -> Engine:
    """An engine, whose steps overlap or not."""
    config = EngineConfig(limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len, limits.block_size)
    return Engine(cast("Runner", runner) if overlap else OneByOne(runner), config)
