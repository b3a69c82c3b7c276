"""From a model's name to a running engine: the files are found and checked, memory is planned, weights are loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from ..kernels.backend import MATRIX_UNITS, Backend, for_cache, open_backend, open_library
from ..kernels.cpu.build import cpu_features
from ..kernels.cpu.library import CpuLibrary
from .checkpoint import EMBEDDING, OUTPUT, Progress, tensor_shapes
from .config import ModelConfig, read_model_config
from .device import CudaDevice
from .engine import Engine
from .errors import ModelError, UnsupportedModelError
from .hub import find_model, fingerprint
from .kv_scales import find_scales
from .load_device import load_on_device
from .load_transformers import plan_transformers
from .memory import Footprint, available_bytes, footprint, plan_num_blocks
from .model_folder import check_folder
from .models.transformers_config import TransformersConfig, read_transformers_config
from .passes import DecoderPasses, Passes
from .runner import RunnerLimits, TorchRunner
from .tokenizer import ModelTokenizer, load_tokenizer
from .types import EngineConfig, ModelInfo, Runner, Tokenizer
from .weights import allocate, load_weights

DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
}  # fmt: skip
KV_DTYPES = {
    **DTYPES, "float16": torch.float16, "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8,
}  # fmt: skip
BF16_FROM_PARAMETERS = (
    64_000_000  # below, float32 costs little on a CPU and every result can be compared to the last bit
)
_WIDE_REGISTERS = {"avx2", "asimd"}  # as x86 and Arm CPUs name them
_NEVER = {"auto_map", "quantization_config", "is_encoder_decoder", "dtype"}  # refused by whatever runs the model
GIB = float(1 << 30)
R = TypeVar("R", bound=Runner)
MakeRunner = Callable[[Passes, Backend, RunnerLimits, torch.Tensor | None], R]
logger = logging.getLogger(__name__)


def load_engine(
    model: str | Path,
    config: EngineConfig | None = None,
    progress: Progress | None = None,
    *,
    revision: str | None = None,
) -> tuple[Engine, Tokenizer, ModelInfo]:
    """Load a model and build an engine on it.

    model     a directory, or the name of a model on the Hugging Face hub (owner/name), which is downloaded
    config    sizes; what is None is worked out from the model and the machine
    progress  called with (bytes of weights read, bytes in all) after each tensor
    revision  of a model on the hub: a branch, a tag or a commit; None is its main branch

    Raises:
        ModelError: in one sentence, what is missing, refused or too large; see `errors`.
    """
    config = config or EngineConfig()
    model_dir = find_model(model, revision)
    check_folder(model_dir)
    model_config = read_config(model_dir)
    device = resolve_device(config.device)
    dtype = _dtype_for(device, config.dtype, model_config)
    longest = config.max_model_len or model_config.max_position
    choices = model_config.choices(longest) if isinstance(model_config, ModelConfig) else ""
    info = ModelInfo(name=str(model), fingerprint=fingerprint(model_dir, dtype, choices))
    tokenizer = load_tokenizer(model_dir)
    check_vocabulary(tokenizer, model_config)
    backend = open_backend("auto", device.type, dtype)
    if device.type == "cpu":
        return Engine(load_runner(model_dir, model_config, config, dtype, backend, progress), config), tokenizer, info
    if not isinstance(model_config, ModelConfig):
        raise UnsupportedModelError("device", "Models that run through transformers' code run on the CPU; choose cpu.")
    types = dtype, resolve_kv_dtype(config.kv_cache_dtype, dtype)
    runner = load_on_device(model_dir, model_config, config, types, backend, CudaDevice(device), progress)
    return Engine(runner, config), tokenizer, info


def _dtype_for(device: torch.device, name: str, model: ModelConfig | TransformersConfig) -> torch.dtype:
    if device.type == "cpu":
        return resolve_dtype(name, model, bf16_is_fast(own_products=isinstance(model, ModelConfig)))
    return torch.float16 if name in {"float16", "fp16"} else resolve_dtype(name, model, fast_bf16=True)


def read_config(model_dir: Path) -> ModelConfig | TransformersConfig:
    """Read a checkpoint's configuration, for our own decoder if that knows the model, else for transformers' code.

    Raises ModelError: as `read_model_config`; UnsupportedModelError only if neither takes the model.
    """
    try:
        model = read_model_config(model_dir)
    except UnsupportedModelError as error:
        if error.feature in _NEVER:
            raise
        try:
            other = read_transformers_config(model_dir, "" if error.feature == "architectures" else str(error))
        except UnsupportedModelError as again:
            if again.feature == "quantization_config" and error.feature != "architectures":
                raise error from again  # weights in 4 bits are for our own decoder alone: what it lacks is the reason
            raise
        logger.info("%s runs through transformers' own code: %s", other.architecture, error)
        return other
    logger.info("%s runs natively", model.architecture)
    if model.tie_word_embeddings and tensor_shapes(model_dir).keys() >= {EMBEDDING, OUTPUT}:
        return replace(model, tie_word_embeddings=False)  # it may differ from the embedding, and then it counts
    return model


def load_runner(
    model_dir: Path,
    model: ModelConfig | TransformersConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    backend: Backend,
    progress: Progress | None = None,
    make_runner: MakeRunner[R] = TorchRunner,
) -> R:
    """Plan memory, load weights and build the runner.

    Raises:
        WeightsError, UnsupportedModelError, MemoryBudgetError
    """
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    backend = for_cache(backend, kv_dtype)
    if isinstance(model, ModelConfig):
        size, passes = _native(model_dir, model, config, dtype, kv_dtype, backend)
    else:
        size, passes = plan_transformers(model_dir, model, config, dtype, kv_dtype, backend)
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.most_positions:
        raise ModelError(
            f"max_model_len {max_model_len} is more than the {model.most_positions} positions of the model "
            "(max_position_embeddings in config.json)."
        )
    counts = plan_num_blocks(size, config, max_model_len, available_bytes())
    limits = RunnerLimits(
        num_blocks=counts.full,
        num_window_blocks=counts.window,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_dtype=kv_dtype,
    )
    made = passes(progress)
    scales = find_scales(model_dir, made, backend.kv_layout, kv_dtype, max_model_len)
    return make_runner(made, backend, limits, scales)


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
    if model.mxfp4:
        logger.info(
            "Weights in 4 bits (mxfp4) are brought to %s as they are read: all weights take %.2f GiB",
            str(dtype).removeprefix("torch."),
            shape_only.num_bytes / GIB,
        )

    def load(progress: Progress | None) -> Passes:
        weights = load_weights(model_dir, model, dtype, torch.device("cpu"), progress)
        if backend.pack is not None:
            weights = weights.packed(backend.pack, backend.compressed, backend.screened)
        return DecoderPasses(model, weights, backend)

    return footprint(model, config, weights_bytes, dtype.itemsize, kv_dtype), load


def check_vocabulary(tokenizer: ModelTokenizer, model: ModelConfig | TransformersConfig) -> None:
    """Refuse a tokenizer with ids for which the model has no row: prompts would ask for embeddings that are not there.

    Raises ModelError.
    """
    if tokenizer.vocab_size > model.vocab_size:
        raise ModelError(
            f"The tokenizer gives ids up to {tokenizer.vocab_size - 1}, and the model's embedding has only "
            f"{model.vocab_size} rows (vocab_size); take the tokenizer that belongs to the model, or remove the added "
            "tokens that are too many."
        )


def resolve_device(name: str) -> torch.device:
    """Give the device for a setting: "auto" is the CPU, as long as no GPU has been tried.

    Raises UnsupportedModelError for a device that is unknown, or not there.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UnsupportedModelError("device", f"The device {name!r} is not supported; choose auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise UnsupportedModelError("device", f"The device 'cuda' is not there: {why}; choose auto or cpu.")
    return torch.device(name if name == "cuda" else "cpu")


def resolve_dtype(name: str, model: ModelConfig | TransformersConfig, fast_bf16: bool) -> torch.dtype:
    """Give the type of weights and activations for a setting.

    "auto" on a CPU is float32, except for bfloat16 checkpoints of more than 64 million parameters where products of
    bfloat16 are as fast (`fast_bf16`), and for those with weights in 4 bits. float16 checkpoints are widened: a CPU
    does not compute in float16.
    """
    if name != "auto":
        return _dtype(name, "dtype")
    if isinstance(model, ModelConfig) and model.mxfp4:
        return torch.bfloat16
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


def bf16_is_fast(*, own_products: bool) -> bool:
    """Whether products of bfloat16 are no slower than those of float32, which take twice the memory.

    That is so where the CPU has instructions for them. Without these, torch's are slow, but not our own
    (`own_products`), if they can be compiled: they widen values in registers.
    """
    features = set(cpu_features().split())
    if not (MATRIX_UNITS | {"avx512_bf16"}).isdisjoint(features):
        return True
    return own_products and not _WIDE_REGISTERS.isdisjoint(features) and isinstance(open_library(), CpuLibrary)


def _dtype(name: str, setting: str, known: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
    if name not in known:
        twice = (
            {"float32", "bfloat16", "float16"} if setting == "kv_cache_dtype" else {"fp32", "bf16"}
        )  # what no flag takes
        names = ", ".join(each for each in known if each not in twice)
        raise UnsupportedModelError(setting, f"{setting} {name!r} is not supported; choose auto, {names}.")
    return known[name]
