"""Makes the blocks of an engine: one pool, or two where layers have a window."""

from __future__ import annotations

from .kv_blocks import KVBlocks
from .prefix_cache import PrefixCache
from .types import EngineConfig, Runner
from .window_blocks import WindowLimits, blocks_spanned


def make_blocks(runner: Runner, config: EngineConfig, max_model_len: int, cache: PrefixCache | None) -> KVBlocks:
    """Give the pools that a runner has memory for, and names of prefixes where it has no layer that sees all."""
    if not runner.window:
        return KVBlocks(runner.num_blocks, runner.block_size, cache)
    window = WindowLimits(runner.window, runner.num_window_blocks, config.max_num_batched_tokens)
    num_blocks = runner.num_blocks or _num_names(window, runner.block_size, config.max_num_seqs, max_model_len)
    return KVBlocks(num_blocks, runner.block_size, cache, window)


def _num_names(window: WindowLimits, block_size: int, max_num_seqs: int, max_model_len: int) -> int:
    """As many as can be wanted at once: all sequences as long as can be, or all window blocks in use by such."""
    longest, least = -(-max_model_len // block_size), blocks_spanned(window.size, block_size)
    return min(max_num_seqs * longest, window.num_blocks * -(-longest // least))
