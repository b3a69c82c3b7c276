"""Every kernel launched as the backend launches it, at the shapes of a model: for `fake_gpu`, which computes nothing.

A launch has a name, `<model> <operation> [<cache>] [<window>]`, under which its needs are kept in the table. What is
not in the constants of a kernel is small here: numbers of rows, sequences and blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from headrace.kernels.adjust import Adjustments
from headrace.kernels.attention import Paging, SharedPrefix
from headrace.kernels.gpu import gated, rms_norm, rotary
from headrace.kernels.gpu.adjust import adjust
from headrace.kernels.gpu.block_copy import copy_blocks
from headrace.kernels.gpu.logprobs import logprobs
from headrace.kernels.gpu.ops import Attending, sharing
from headrace.kernels.gpu.sample import sample
from headrace.kernels.kv_layout import FLOAT8_LARGEST, cached_width
from headrace.kernels.sample import SampleParameters
from tests.support.kernel_models import MODELS, KernelModel, caches_for

ROWS, SEQUENCES, BLOCKS, BLOCK_SIZE = 16, 4, 4, 16
POSITIONS = 8192  # that a block table has room for


@dataclass(frozen=True, slots=True)
class Launch:
    """Something to be called under `fake_gpu(capability)`."""

    name: str
    capability: int
    run: Callable[[], object]


def launches(capability: int) -> list[Launch]:
    """All that is launched for the models on sm_`capability`."""
    found: list[Launch] = []
    for model in MODELS:
        named = [*_row_operations(model), *_sampling(model), *_cached(model, capability)]
        found += [Launch(f"{model.name} {name}", capability, run) for name, run in named]
    return found


def core(capability: int) -> list[Launch]:
    """Those with a cache as the activations are, and of the first model all."""
    others = [name for name in caches_for(capability) if name != "bf16"]
    first = MODELS[0].name
    return [
        each
        for each in launches(capability)
        if each.name.startswith(first) or not any(f" {other}" in each.name for other in others)
    ]


def _row_operations(model: KernelModel) -> Iterator[tuple[str, Callable[[], object]]]:
    x = torch.zeros((ROWS, model.hidden), dtype=torch.bfloat16)
    weight = torch.zeros(model.hidden)
    gate_up = torch.zeros((ROWS, 2 * model.middle), dtype=torch.bfloat16)
    yield "rms_norm", partial(rms_norm.rms_norm, x, weight, 1e-5)
    yield "add_rms_norm", partial(rms_norm.add_rms_norm, x, x, weight, 1e-5)
    yield "gated", partial(gated.gelu_mul if model.gelu else gated.silu_mul, gate_up)


def _sampling(model: KernelModel) -> Iterator[tuple[str, Callable[[], object]]]:
    scores = torch.zeros((2, model.vocab))
    whole = torch.zeros(2, dtype=torch.int64)
    parameters = SampleParameters(
        temperature=torch.zeros(2),
        top_k=torch.zeros(2, dtype=torch.int32),
        top_p=torch.ones(2),
        min_p=torch.zeros(2),
        seed=whole,
        choice=whole,
        position=whole,
    )
    drawn = replace(parameters, temperature=torch.ones(2))
    yield "greedy", partial(sample, scores, parameters)
    yield "drawn", partial(sample, scores, drawn)
    yield "cut", partial(sample, scores, replace(drawn, top_k=torch.full((2,), 40, dtype=torch.int32)))
    yield "adjust", partial(adjust, scores, Adjustments(whole, whole, torch.ones(2), torch.zeros(2), torch.zeros(2)))
    yield "logprobs", partial(logprobs, scores, [0, 1], whole, [0, 20])


def _cached(model: KernelModel, capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, cached in caches_for(capability).items():
        layers = torch.zeros((1, 2, BLOCKS, BLOCK_SIZE, model.kv_heads, cached_width(model.head_dim, cached)))
        layers = layers.to(cached)
        scales = torch.ones(2, model.kv_heads) if cached in FLOAT8_LARGEST else None
        yield f"copy {name}", partial(copy_blocks, layers, [(0, 1)])
        yield f"rotate {name}", partial(_rotate, model, layers[0], scales)
        for window in model.windows:
            seen = f"window {window}" if window else ""
            for operation, queries, is_shared in (("decode", 1, False), ("shared", 1, True), ("prefill", 0, False)):
                if not (is_shared and window):
                    attend = partial(_attend, model, layers[0], scales, window, queries, is_shared, capability)
                    yield f"{operation} {name} {seen}".rstrip(), attend


def _rotate(model: KernelModel, cache: torch.Tensor, scales: torch.Tensor | None) -> None:
    qkv = torch.zeros((ROWS, (model.heads + 2 * model.kv_heads) * model.head_dim), dtype=torch.bfloat16)
    at = torch.zeros(ROWS, dtype=torch.int64)
    table = torch.zeros((POSITIONS, model.head_dim))
    rotary.rotate_and_store(qkv, at, table, cache[0], cache[1], at, model.query_key_norm(), scales)


def _attend(
    model: KernelModel, cache: torch.Tensor, scales: torch.Tensor | None, window: int, queries: int, is_shared: bool,
    capability: int,
) -> None:  # fmt: skip
    """One layer's attention as the backend does it; sequences with one query each, or `queries` of 0: nobody knows."""
    query = torch.zeros((ROWS, model.heads, model.head_dim), dtype=torch.bfloat16)
    counts = torch.zeros(2 * SEQUENCES + 1, dtype=torch.int32)
    table = torch.zeros((SEQUENCES, POSITIONS // BLOCK_SIZE), dtype=torch.int32)
    shared = None
    if is_shared:
        _, per_tile = sharing(POSITIONS, model.heads // model.kv_heads)
        tiles = torch.zeros((1, per_tile), dtype=torch.int32)
        shared = SharedPrefix(tiles, torch.zeros(1, dtype=torch.int32), counts[:SEQUENCES])
    paging = Paging(table, counts[: SEQUENCES + 1], counts[:SEQUENCES], queries, shared)
    Attending(capability).paged_attention(
        query, cache[0], cache[1], paging, model.head_dim**-0.5, window, model.soft_cap, None, scales
    )
