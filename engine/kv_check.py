"""Proves that what sequences hold, what the pools count and what the prefix cache knows agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from .kv_blocks import Copy, KVBlocks
from .sequence import Sequence
from .window_blocks import held


def check_blocks(blocks: KVBlocks, running: Collection[Sequence], copies: Collection[Copy]) -> None:
    """Look at each pool, each running sequence and the cache. `copies` are in flight. Raises RuntimeError."""
    for number, pool in enumerate(blocks.pools):
        claims = Counter(copy.source for copy in copies if copy.pool == number)
        writers: Counter[int] = Counter()
        for sequence in running:
            ids = blocks.tables(sequence)[number]
            claims.update(held(ids))
            writers.update(ids[sequence.num_computed_tokens // blocks.block_size + sequence.shares_last :])
        pool.check(claims)
        for block_id, count in writers.items():
            if count > 1 or pool.is_findable(block_id):
                raise RuntimeError(f"block {block_id} has {count} writers, findable: {pool.is_findable(block_id)}")
    for sequence in running:
        _check_sequence(blocks, sequence)
    if blocks.cache is not None:
        blocks.cache.check(*(pool.is_findable for pool in blocks.pools))


def _check_sequence(blocks: KVBlocks, sequence: Sequence) -> None:
    name = f"{sequence.request_id}/{sequence.choice}"
    if sequence.num_slots != blocks.slots_of(sequence):
        raise RuntimeError(f"{name} has {sequence.num_slots} slots, its blocks {blocks.slots_of(sequence)}")
    if not 0 <= sequence.num_computed_tokens < sequence.num_tokens:
        raise RuntimeError(f"{name} has computed {sequence.num_computed_tokens} of {sequence.num_tokens} tokens")
    if sequence.num_computed_tokens > sequence.num_slots:
        raise RuntimeError(f"{name} has computed more than its blocks hold")
    if [entry.block_id for entry in sequence.chain] != sequence.block_ids[: len(sequence.chain)]:
        raise RuntimeError(f"{name} holds other blocks than the cache says")
    full = sequence.num_computed_tokens // blocks.block_size
    if blocks.cache is not None and len(sequence.chain) != full:
        raise RuntimeError(f"{name} has {full} full blocks, {len(sequence.chain)} entered")
    if blocks.window is not None:
        blocks.window.check(sequence)
