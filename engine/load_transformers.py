"""What a model that runs through transformers' own code takes, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..kernels.backend import Backend
from .checkpoint import Progress
from .errors import UnsupportedModelError, WeightsError
from .memory import Footprint, score_bytes, with_blocks
from .models.fallback import TransformersPasses, load_transformers_model
from .models.self_check import refusal, self_check
from .models.transformers_config import TransformersConfig
from .passes import KvShape, Passes
from .types import EngineConfig

SPARE = 1 << 24  # parameters that a model may have besides those of its files, such as tables that it computes


def plan_transformers(
    model_dir: Path,
    model: TransformersConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    backend: Backend,
) -> tuple[Footprint, Callable[[Progress | None], Passes]]:
    """Check an architecture; give what it takes, and what loads its weights.

    Raises:
        UnsupportedModelError: the self-check refuses it.
    """
    kv = self_check(model, backend)

    def load(progress: Progress | None) -> Passes:
        _check_size(model)
        made = load_transformers_model(model_dir, model, dtype, progress)
        try:
            passes = TransformersPasses(model, made, kv, backend)
            passes.rehearse()
        except UnsupportedModelError as error:
            raise refusal(model, error.feature, str(error)) from error
        return passes

    step_bytes = config.max_num_batched_tokens * _bytes_per_token(model, kv) + score_bytes(
        model.vocab_size, config, dtype.itemsize
    )
    weights_bytes = model.num_parameters * dtype.itemsize
    return with_blocks(weights_bytes, step_bytes, kv, config.block_size, kv_dtype), load


def _check_size(model: TransformersConfig) -> None:
    """Raise WeightsError where a model would be far larger than its files: that is seen before it takes memory."""
    if (count := model.num_built(model.raw)) > 2 * model.num_parameters + SPARE:
        raise WeightsError(
            f"The weights do not fit the configuration: its model has {count} parameters, and the files "
            f"{model.num_parameters}; take the config.json that belongs to them."
        )


def _bytes_per_token(model: TransformersConfig, kv: KvShape) -> int:
    """Memory of one token's activations, in float32, for that is what norms compute in.

    Operations allocate their results one by one: the residual, what is added to it and a norm's copies, the attention's
    inputs as they come and as they are packed, and the widest product's results with their activation.
    """
    widest = 4 * model.hidden_size
    for name in ("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"):
        value: Any = getattr(model.raw, name, None)
        widest = max(widest, value if isinstance(value, int) else 0)
    experts: Any = getattr(model.raw, "num_experts_per_tok", None)
    attention = (2 * model.num_heads + 4 * kv.num_kv_heads) * kv.head_dim
    return 4 * (8 * model.hidden_size + 2 * attention + 4 * widest * (experts if isinstance(experts, int) else 1))
