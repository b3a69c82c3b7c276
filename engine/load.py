"""From a model's name to a running engine: the files are found and checked, memory is planned, weights are loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..kernels.backend import MATRIX_UNITS, Backend, open_backend
from ..kernels.cpu.build import cpu_features
from .checkpoint import tensor_shapes, weight_files
from .config import ModelConfig, read_model_config
from .engine import Engine
from .errors import ModelError, ModelNotFoundError, UnsupportedModelError
from .load_transformers import plan_transformers
from .memory import Footprint, available_bytes, footprint, plan_num_blocks
from .models.transformers_config import TransformersConfig, read_transformers_config
from .passes import DecoderPasses, Passes
from .runner import RunnerLimits, TorchRunner
from .tokenizer import load_tokenizer
from .types import EngineConfig, ModelInfo, Tokenizer
from .weights import Progress, allocate, load_weights

DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
}  # fmt: skip
KV_DTYPES = {**DTYPES, "int8": torch.int8}
BF16_FROM_PARAMETERS = (
    64_000_000  # below, float32 costs little on a CPU and every result can be compared to the last bit
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DECISIVE_FILES = (
    "config.json", "generation_config.json", "tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "spiece",
    "chat_template",
)  # fmt: skip
_NEVER = {"auto_map", "quantization_config", "is_encoder_decoder", "dtype"}  # refused by whatever runs the model
logger = logging.getLogger(__name__)
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def load_engine(
    model: str | Path, config: EngineConfig | None = None, progress: Progress | None = None
) -> tuple[Engine, Tokenizer, ModelInfo]:
    """Load a model and build an engine on it.

    model     a directory, or the name of a model on the Hugging Face hub (owner/name), which is downloaded
    config    sizes; what is None is worked out from the model and the machine
    progress  called with (files of weights loaded, files in all) after each

    Raises:
        ModelError: in one sentence, what is missing, refused or too large; see `errors`.
    """
    config = config or EngineConfig()
    model_dir = find_model(model)
    model_config = read_config(model_dir)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, model_config, bf16_is_fast())
    info = ModelInfo(name=str(model), fingerprint=fingerprint(model_dir, dtype))
    tokenizer = load_tokenizer(model_dir)
    runner = load_runner(model_dir, model_config, config, dtype, open_backend("auto", device.type, dtype), progress)
    return Engine(runner, config), tokenizer, info


def read_config(model_dir: Path) -> ModelConfig | TransformersConfig:
    """Read a checkpoint's configuration, for our own decoder if that knows the model, else for transformers' code.

    Raises ModelError: as `read_model_config`; UnsupportedModelError only if neither takes the model.
    """
    try:
        model = read_model_config(model_dir)
    except UnsupportedModelError as error:
        if error.feature in _NEVER:
            raise
        other = read_transformers_config(model_dir)
        logger.info("%s runs through transformers' own code: %s", other.architecture, error)
        return other
    logger.info("%s runs natively", model.architecture)
    return model


def load_runner(
    model_dir: Path,
    model: ModelConfig | TransformersConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    backend: Backend,
    progress: Progress | None = None,
) -> TorchRunner:
    """Plan memory, load weights and build the runner.

    Raises:
        WeightsError, UnsupportedModelError, MemoryBudgetError
    """
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    if isinstance(model, ModelConfig):
        size, passes = _native(model_dir, model, config, dtype, kv_dtype, backend)
    else:
        size, passes = plan_transformers(model_dir, model, config, dtype, kv_dtype, backend)
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ModelError(f"max_model_len {max_model_len} is more than the {model.max_position} positions of the model.")
    limits = RunnerLimits(
        num_blocks=plan_num_blocks(size, config, max_model_len, available_bytes()),
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_dtype=kv_dtype,
    )
    return TorchRunner(passes(progress), backend, limits)


def _native(
    model_dir: Path,
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    backend: Backend,
) -> tuple[Footprint, Callable[[Progress | None], Passes]]:
    """What our own decoder takes, and what loads it."""
    shape_only, _ = allocate(model, dtype, torch.device("meta"))
    weights_bytes = shape_only.num_bytes + backend.screen_bytes(model.vocab_size, model.hidden_size)

    def load(progress: Progress | None) -> Passes:
        weights = load_weights(model_dir, model, dtype, torch.device("cpu"), progress)
        if backend.pack is not None:
            weights = weights.packed(backend.pack, backend.compressed, backend.screened)
        return DecoderPasses(model, weights, backend)

    return footprint(model, config, weights_bytes, dtype.itemsize, kv_dtype), load


def find_model(model: str | Path) -> Path:
    """Give the directory of a model; a hub name that is no directory is downloaded. Raises ModelNotFoundError."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if not isinstance(model, str) or not _HUB_ID.fullmatch(model):
        raise ModelNotFoundError(f"There is no model directory {path}.")
    import huggingface_hub

    hub: Any = huggingface_hub

    try:
        return Path(hub.snapshot_download(model, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:  # its own errors are of these two, network errors included
        raise ModelNotFoundError(f"{model} is no directory, and cannot be had from the hub: {error}") from error


def resolve_device(name: str) -> torch.device:
    """Give the device for a setting: "auto" and "cpu" are the CPU. Raises UnsupportedModelError for any other."""
    if name not in ("auto", "cpu"):
        raise UnsupportedModelError("device", f"The device {name!r} is not supported; choose auto or cpu.")
    return torch.device("cpu")


def resolve_dtype(name: str, model: ModelConfig | TransformersConfig, fast_bf16: bool) -> torch.dtype:
    """Give the type of weights and activations for a setting.

    "auto" on a CPU is float32, except for bfloat16 checkpoints of more than 64 million parameters where the CPU
    multiplies bfloat16 natively (`fast_bf16`). float16 checkpoints are widened: a CPU does not compute in float16.
    """
    if name != "auto":
        return _dtype(name, "dtype")
    if isinstance(model, ModelConfig):
        weights, _ = allocate(model, torch.bfloat16, torch.device("meta"))
        num_parameters = weights.num_bytes // torch.bfloat16.itemsize
    else:
        num_parameters = model.num_parameters
    large = num_parameters > BF16_FROM_PARAMETERS
    return torch.bfloat16 if model.dtype == "bfloat16" and fast_bf16 and large else torch.float32


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Give the type of the KV cache for a setting; "auto" is that of the activations. Raises UnsupportedModelError."""
    return dtype if name == "auto" else _dtype(name, "kv_cache_dtype", KV_DTYPES)


def bf16_is_fast() -> bool:
    """Whether the CPU has instructions for bfloat16 products."""
    return not (MATRIX_UNITS | {"avx512_bf16"}).isdisjoint(cpu_features().split())


def _dtype(name: str, setting: str, known: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
    if name not in known:
        raise UnsupportedModelError(setting, f"{setting} {name!r} is not supported; choose auto, {', '.join(known)}.")
    return known[name]


def fingerprint(model_dir: Path, dtype: torch.dtype) -> str:
    """SHA-256, in hex, of what decides a model's output.

    That is its configuration, its tokenizer, names, shapes and sizes of the weights, and the type they are computed in.
    The weights' own bytes are left out: reading them all would take as long as loading.
    """
    digest = hashlib.sha256(str(dtype).encode())
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and path.name.startswith(_DECISIVE_FILES):
            content = path.read_bytes()
            digest.update(f"{path.name}:{len(content)}:".encode() + content)
    for path in weight_files(model_dir):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
    digest.update(json.dumps(sorted(tensor_shapes(model_dir).items())).encode())
    return digest.hexdigest()
