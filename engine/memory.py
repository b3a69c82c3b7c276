"""How many KV blocks fit, decided before anything large is allocated.

    available memory
    [ weights | one step's activations and scores | KV blocks | left to others ]

On the CPU the machine is shared: the blocks get a quarter of what `gpu_memory_utilization` allows, and at most 4 GiB,
unless one sequence of max_model_len needs more. More than max_num_seqs such sequences is never useful.

Layers with a window get as many blocks as the layers that see all, until they have all that they can use: what
max_num_seqs sequences see in a step, and as much again for prefixes in the cache; what is left goes to the others. So
the same memory never has less room than if all layers shared their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..kernels.kv_layout import cached_width
from ..kernels.logprobs import SLICE_ROWS
from .config import ModelConfig
from .errors import MemoryBudgetError
from .passes import KvShape, kv_shape
from .runner import PROMPT_LOGPROB_ROWS
from .types import EngineConfig
from .window_blocks import blocks_spanned

CPU_SHARE = 0.25
CPU_MOST_BYTES = 4 << 30
_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a model takes besides its KV blocks, and what one block takes."""

    weights_bytes: int
    step_bytes: int
    block_bytes: int  # of one block in all layers that see all; 0: there are none
    window_block_bytes: int = 0  # in all layers with a window
    window: int = 0  # the largest; 0: none


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks each kind of layers gets."""

    full: int
    window: int = 0


def footprint(
    model: ModelConfig, config: EngineConfig, weights_bytes: int, item_bytes: int, kv_dtype: torch.dtype
) -> Footprint:
    """Work out the sizes; `item_bytes` is a weight's and an activation's size, `kv_dtype` the cache's type."""
    # every buffer of a recorded pass: no two of one width share one at once, those of different widths never do
    attention = model.qkv_size + 2 * model.num_heads * model.head_dim
    per_token = (4 * model.hidden_size + attention + 3 * model.intermediate_size) * item_bytes
    if model.experts is not None:  # rows as they are sorted, and what the experts make of them
        per_token += model.experts.top_k * (2 * model.hidden_size + model.intermediate_size) * item_bytes
    step_bytes = config.max_num_batched_tokens * per_token + score_bytes(model.vocab_size, config, item_bytes)
    return with_blocks(weights_bytes, step_bytes, kv_shape(model), config.block_size, kv_dtype)


def score_bytes(vocab_size: int, config: EngineConfig, item_bytes: int) -> int:
    """Memory of the scores at full batch.

    The product's own, their float32 copy, and the copy that penalties change; then slices for log-probabilities, each
    with the table of its softmax.
    """
    rows = config.max_num_seqs + max(PROMPT_LOGPROB_ROWS, SLICE_ROWS)
    return rows * (item_bytes + 4 + 4) * vocab_size


def with_blocks(weights_bytes: int, step_bytes: int, kv: KvShape, block_size: int, kv_dtype: torch.dtype) -> Footprint:
    """Add the memory of one block in each kind of layers."""
    layer_bytes = 2 * block_size * kv.num_kv_heads * cached_width(kv.head_dim, kv_dtype) * kv_dtype.itemsize
    full = (kv.num_layers - kv.num_windowed) * layer_bytes
    return Footprint(weights_bytes, step_bytes, full, kv.num_windowed * layer_bytes, kv.window)


class _Division:
    """How blocks are divided among the two kinds of layers."""

    def __init__(self, size: Footprint, config: EngineConfig, max_model_len: int) -> None:
        self._size = size
        self._longest = -(-max_model_len // config.block_size)
        self._all_of_them = self._longest * config.max_num_seqs
        seen = min(self._longest, blocks_spanned(size.window, config.block_size))
        in_step = -(-config.max_num_batched_tokens // config.block_size)
        self._most_window = min(2 * config.max_num_seqs * seen + in_step, self._all_of_them) if size.window else 0
        one_window = min(self._longest, seen + in_step) if size.window else 0
        self.least = BlockCounts(self._longest if size.block_bytes else 0, one_window)  # for one of max_model_len

    def counts(self, num_blocks: int) -> BlockCounts:
        """Give so many blocks to the layers that see all, or, where there are none, to the others."""
        if not self._size.block_bytes:
            return BlockCounts(0, num_blocks)
        return BlockCounts(num_blocks, min(num_blocks, self._most_window))

    def num_bytes(self, counts: BlockCounts) -> int:
        """Memory of blocks."""
        return counts.full * self._size.block_bytes + counts.window * self._size.window_block_bytes

    def fitting(self, num_bytes: int) -> BlockCounts:
        """Give the blocks that fit into so much memory, which is enough for `least`, and are of use."""
        size, most_window = self._size, self._most_window
        if not size.block_bytes:
            return BlockCounts(0, min(num_bytes // size.window_block_bytes, most_window))
        full = num_bytes // (size.block_bytes + size.window_block_bytes)
        if size.window and full > most_window:
            full = (num_bytes - most_window * size.window_block_bytes) // size.block_bytes
        full = min(max(full, self._longest), self._all_of_them)
        if not size.window:
            return BlockCounts(full)
        left = num_bytes - full * size.block_bytes
        return BlockCounts(full, min(full, most_window, left // size.window_block_bytes))


def plan_num_blocks(
    size: Footprint, config: EngineConfig, max_model_len: int, available_bytes: int, *, whole: bool = False
) -> BlockCounts:
    """Choose the number of KV blocks, or check the one that the configuration sets.

    whole  blocks may have all that is left: a device that is nobody else's

    Raises:
        MemoryBudgetError: it does not fit; the message names the setting to lower.
    """
    usable = int(available_bytes * config.gpu_memory_utilization)
    fixed = size.weights_bytes + size.step_bytes
    if fixed > usable:
        lower = "max_num_batched_tokens or max_num_seqs" if size.weights_bytes < usable else "the size of the model"
        raise too_large(f"weights and one step's activations need {gib(fixed)}", lower, fixed, usable)
    division = _Division(size, config, max_model_len)
    if config.num_kv_blocks is not None:
        counts = division.counts(config.num_kv_blocks)
        needed = fixed + division.num_bytes(counts)
        if needed > usable:
            raise too_large(f"{config.num_kv_blocks} KV blocks make it {gib(needed)}", "num_kv_blocks", needed, usable)
        return counts
    needed = fixed + division.num_bytes(division.least)
    if needed > usable:
        raise too_large(
            f"with one sequence of {max_model_len} tokens it is {gib(needed)}", "max_model_len", needed, usable
        )
    share = usable - fixed if whole else min(int(CPU_SHARE * (usable - fixed)), CPU_MOST_BYTES)
    return division.fitting(max(share, needed - fixed))


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, or its control group's if that is less."""
    return min(_machine_available_bytes(), _group_available_bytes())


def _machine_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise MemoryBudgetError("This system does not say how much memory is free; set num_kv_blocks.", 0, 0)


def _group_available_bytes() -> int:
    """What the container's limit leaves, by either version of control groups; without a limit, a very large number."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        root = Path("/sys/fs/cgroup")
        if (root / limit).is_file() and (root / used).is_file():
            most = (root / limit).read_text(encoding="ascii").strip()
            if most != "max":
                return max(0, int(most) - int((root / used).read_text(encoding="ascii")))
    return 1 << 62


def too_large(what: str, lower: str, needed: int, usable: int) -> MemoryBudgetError:
    """Say what does not fit, and which setting to lower."""
    return MemoryBudgetError(
        f"Not enough memory: {what}, and {gib(usable)} may be used. Lower {lower}.", needed, usable
    )


def gib(num_bytes: int) -> str:
    """Bytes in words."""
    return f"{num_bytes / _GIB:.2f} GiB"
