"""The blocks of the layers with a window: which ones a sequence needs, how many it will, and when it lets go of them.

    window_ids  [ HOLE ....................... | held ............................. ]
                0                              ↑ the first that the next query sees

Such a block comes free as soon as no query can reach it any more. If the cache has it, it can be found until it is used
again; a prefix is found if the blocks that its next query sees are there, whatever has become of those before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

from .block_pool import BlockPool
from .prefix_cache import HOLE, CachedBlock
from .sequence import Sequence


def blocks_spanned(num_positions: int, block_size: int) -> int:
    """Return how many blocks so many neighbouring positions may lie in, wherever they begin."""
    return (num_positions + 2 * block_size - 2) // block_size


def held(block_ids: List[int]) -> Iterator[int]:
    """Those that have not been let go, the last one first."""
    return (block_id for block_id in reversed(block_ids) if block_id != HOLE)


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """What is fixed for the layers with a window; where their windows differ, the largest counts."""

    size: int  # positions that a query sees, its own included
    num_blocks: int
    step_tokens: int  # that one step computes at most


class WindowBlocks:
    """Knows no other blocks than these. A sequence's holes are exactly the blocks that no query of it can reach."""

    def __init__(self, limits: WindowLimits, block_size: int, pool: BlockPool) -> None:
        self.pool = pool
        self._limits = limits
        self._block_size = block_size

    def out_of_reach(self, num_computed: int) -> int:
        """Return how many of the first blocks no query sees any more once so many tokens are computed."""
        return max(0, num_computed - self._limits.size + 1) // self._block_size

    def usable(self, found: List[CachedBlock]) -> int:
        """Return the length of the longest part of a cached prefix of which the next query finds all that it sees."""
        longest = unbroken = 0
        for end, entry in enumerate(found, 1):
            unbroken = unbroken + 1 if entry.window_id != HOLE else 0
            if unbroken >= end - self.out_of_reach(end * self._block_size):
                longest = end
        return longest

    def seen(self, found: List[CachedBlock]) -> list[int]:
        """Return a row of block ids for a prefix that is usable, holes where the next query does not reach."""
        holes = self.out_of_reach(len(found) * self._block_size)
        return [HOLE] * holes + [entry.window_id for entry in found[holes:]]

    def most(self, sequence: Sequence, num_computed: int) -> int:
        """Return how many blocks a sequence holds at most at once within the next `block_size` steps."""
        chunk = min(sequence.num_tokens - num_computed, self._limits.step_tokens)
        spanned = blocks_spanned(self._limits.size - 1 + chunk, self._block_size)
        soon = min(sequence.num_tokens - 1 + self._block_size, sequence.max_len - 1)
        return min(-(-soon // self._block_size), spanned, self._limits.num_blocks)

    def wanted(self, running: Iterable[Sequence]) -> int:
        """Return how many blocks will be asked for at most within the next `block_size` steps."""
        wanted = 0
        for sequence in running:
            computed = sequence.num_computed_tokens
            lacking = self.most(sequence, computed) - len(sequence.window_ids) + self.out_of_reach(computed)
            wanted += max(0, lacking) + sequence.shares_last
        return wanted

    def fitting(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens there are blocks for; one at least, for which others may go.

        So a chunk of a prompt becomes shorter before it takes blocks away from anybody.
        """
        blocks = len(sequence.window_ids) + self.pool.num_free - sequence.shares_last
        return max(1, min(num_tokens, blocks * self._block_size - sequence.num_planned_tokens))

    def let_go(self, sequence: Sequence) -> None:
        """Take back what no query of a sequence can reach any more; what is in flight is waited for."""
        ids, reached = sequence.window_ids, self.out_of_reach(sequence.num_computed_tokens)
        first = reached
        while first > 0 and ids[first - 1] != HOLE:
            first -= 1
        if first < reached:
            self.pool.release(ids[first:reached], sequence.last_step)
            ids[first:reached] = [HOLE] * (reached - first)

    def check(self, sequence: Sequence) -> None:
        """Prove that a sequence has let go of what it must and of nothing else. Raises RuntimeError."""
        ids, holes = sequence.window_ids, self.out_of_reach(sequence.num_computed_tokens)
        if ids[:holes] != [HOLE] * holes or HOLE in ids[holes:]:
            name = f"{sequence.request_id}/{sequence.choice}"
            raise RuntimeError(f"{name} sees nothing of its first {holes} window blocks, and holds {ids}")
        for entry, window_id in zip(sequence.chain, ids, strict=False):
            if window_id not in (HOLE, entry.window_id):
                raise RuntimeError(f"{sequence.request_id} holds another window block than the cache says")
