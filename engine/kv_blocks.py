"""The blocks that sequences hold: where block pools, prefix cache and sequences meet.

    block_ids   [ found in the cache | own, full and entered | own, still filling | own, empty ]
    window_ids  [ HOLE .......... | found or own, alike ..............................]
    chain       [ one entry for each of these ...............]
                0                                            num_computed_tokens // block_size

A block is written only by one sequence, and only at or after its `num_computed_tokens`. Blocks in `chain` are full and
committed, so they may be shared with anybody; of what a sibling shares, only the last block can still be written, and
that is copied first (`shares_last`).

Layers with a window have blocks of their own, of another pool (`window_blocks`): only as many as a sequence sees, taken
step by step. The other blocks are those of the layers that see all. Where there are none such they take no memory, but
still name the places of the prefix cache, which is a tree of whole prefixes; see `make_blocks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .block_pool import BlockPool
from .prefix_cache import HOLE, CachedBlock, PrefixCache
from .running import RunningSet
from .sequence import Sequence
from .types import ScheduledRow
from .window_blocks import WindowBlocks, WindowLimits, blocks_spanned, held

SHARE_BLOCKS = 8  # so many blocks are worth a step's wait, if another sequence computes them in it


class Need(NamedTuple):
    """Numbers of blocks, of each pool."""

    full: int
    window: int = 0


class Copy(NamedTuple):
    """A block to be copied before a step writes anything. `pool` is the index of the pool that both are from."""

    pool: int
    source: int
    destination: int


class KVBlocks:
    """Gives blocks to sequences and takes them back. `cache` None means that nothing is ever found again.

    window  of the layers that have one; None: all see all
    """

    def __init__(
        self, num_blocks: int, block_size: int, cache: PrefixCache | None, window: WindowLimits | None = None
    ) -> None:
        self.block_size = block_size
        self.cache = cache
        self.pool = BlockPool(num_blocks, self._forget)
        self.pools = [self.pool]
        self.window = None
        self.most_blocks = num_blocks  # that one sequence can ever have
        if window is not None:
            self.pools.append(BlockPool(window.num_blocks, self._forget_window))
            self.window = WindowBlocks(window, block_size, self.pools[1])
            if window.num_blocks < blocks_spanned(window.size, block_size):
                self.most_blocks = min(num_blocks, window.num_blocks)
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # of these, found

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def slots_for(self, num_tokens: int) -> int:
        """Return how many tokens these blocks have room for."""
        return self.blocks_for(num_tokens) * self.block_size

    def tables(self, sequence: Sequence) -> tuple[list[int], ...]:
        """Return a sequence's block ids, of each pool."""
        return (sequence.block_ids,) if self.window is None else (sequence.block_ids, sequence.window_ids)

    def slots_of(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence's blocks have room for."""
        return min(map(len, self.tables(sequence))) * self.block_size

    def spare(self, need: Need) -> int:
        """Return how many blocks are free beyond a need, of the pool that has fewer; negative where it lacks some."""
        return min(pool.num_free - count for pool, count in zip(self.pools, need, strict=False))

    def wanted(self, running: RunningSet) -> Need:
        """Return how many blocks will be asked for at most within the next `block_size` steps."""
        return Need(running.num_wanted(self.block_size), 0 if self.window is None else self.window.wanted(running))

    def admit(self, sequence: Sequence, headroom: Need) -> Need | None:
        """Give a sequence blocks for all its known tokens, the cached ones found, or nothing.

        Window blocks are only those that were found; that there are enough of them is seen to. At least one token is
        always left to compute. Return None if it was done, else how many blocks would have to be free for it to be done
        while leaving `headroom` free.
        """
        found: list[CachedBlock] = []
        reads = self.cache is not None and not sequence.needs_prompt_logprobs
        if self.cache is not None and reads:
            most = (sequence.num_tokens - 1) // self.block_size
            found = self.cache.match(sequence.token_ids, most, sequence.salt)
        window_ids: list[int] = []
        if self.window is not None:
            del found[self.window.usable(found) :]
            window_ids = self.window.seen(found)
        num_new = self.blocks_for(sequence.num_tokens) - len(found)
        needed = self._needed(sequence, found, window_ids, headroom)
        if self.spare(needed) < 0:
            return needed
        block_ids = [entry.block_id for entry in found]
        for pool, ids in zip(self.pools, (block_ids, window_ids), strict=False):
            for block_id in held(ids):  # before anything is allocated, which could take the very blocks that were found
                pool.share(block_id)
        sequence.block_ids = block_ids + self.pool.allocate(num_new)
        sequence.window_ids = window_ids
        sequence.chain = found
        sequence.num_computed_tokens = len(found) * self.block_size
        self._replaced(sequence)
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        if reads:
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        return None

    def _needed(self, sequence: Sequence, found: list[CachedBlock], window_ids: list[int], headroom: Need) -> Need:
        """How many blocks must be free for an admission; those found that nobody holds count as free until then."""
        num_kept = sum(self.pool.refs[entry.block_id] == 0 for entry in found)
        full = num_kept + self.blocks_for(sequence.num_tokens) - len(found) + headroom.full
        if self.window is None:
            return Need(full)
        shared = sum(self.window.pool.refs[window_id] > 0 for window_id in held(window_ids))
        most = self.window.most(sequence, len(found) * self.block_size)
        return Need(full, max(0, most - shared) + headroom.window)

    def will_share(self, row: ScheduledRow, sequence: Sequence) -> bool:
        """Whether a sequence that is not admitted would do well to wait for a planned row: it computes the same prompt.

        That is so if at least half of what the sequence lacks, and no fewer than `SHARE_BLOCKS`, are in the row.
        """
        other, size = row.sequence, self.block_size
        if self.cache is None or other.salt != sequence.salt or sequence.needs_prompt_logprobs:
            return False
        first = row.start // size
        last = min(row.start + row.num_tokens, sequence.num_tokens - 1) // size  # blocks [first, last) may be shared
        worth = max(SHARE_BLOCKS, (self.blocks_for(sequence.num_tokens) - first + 1) // 2)
        end = (first + worth) * size
        return first + worth <= last and other.token_ids[:end] == sequence.token_ids[:end]

    def missing(self, sequence: Sequence, num_tokens: int) -> Need:
        """Return how many free blocks a sequence needs before its tokens up to `num_tokens` can be written."""
        count = self.blocks_for(num_tokens)
        return Need(
            *(
                max(0, count - len(ids)) + (sequence.shares_last and not self._owns_shared(number, sequence))
                for number, ids in enumerate(self.tables(sequence))
            )
        )

    def grow(self, sequence: Sequence, num_tokens: int) -> list[Copy]:
        """Give a sequence what is `missing`; return the block copies to make first, if any.

        The references to the sources stay: the caller releases them once the step that copies is committed.
        """
        copies: list[Copy] = []
        count = self.blocks_for(num_tokens)
        for number, ids in enumerate(self.tables(sequence)):
            pool = self.pools[number]
            if sequence.shares_last and not self._owns_shared(number, sequence):
                index = sequence.num_computed_tokens // self.block_size
                copies.append(Copy(number, ids[index], pool.allocate(1)[0]))
                ids[index] = copies[-1].destination
            if count > len(ids):
                ids.extend(pool.allocate(count - len(ids)))
        sequence.shares_last = False
        if copies:
            self._replaced(sequence)
        sequence.num_slots = self.slots_of(sequence)
        return copies

    def undo_copies(self, sequence: Sequence, copies: Iterable[Copy]) -> None:
        """Take back what `grow` did for copies that were not made."""
        tables = self.tables(sequence)
        for number, source, destination in copies:
            tables[number][sequence.num_computed_tokens // self.block_size] = source
            sequence.shares_last = True
            self._replaced(sequence)
            self.pools[number].release((destination,), 0)

    def pairs(self, copies: list[Copy]) -> list[tuple[tuple[int, int], ...]]:
        """Return copies as pairs (source, destination), of each pool."""
        return [
            tuple((copy.source, copy.destination) for copy in copies if copy.pool == number)
            for number in range(len(self.pools))
        ]

    def release_sources(self, copies: Iterable[Copy]) -> None:
        """Let go of the blocks that were copied from."""
        for number, source, _ in copies:
            self.pools[number].release((source,), 0)

    def can_fork(self, parent: Sequence, child: Sequence) -> bool:
        """Whether `parent` still has all blocks of the prompt that `child` would see."""
        computed = _computed_by_fork(child)
        first = 0 if self.window is None else self.window.out_of_reach(computed)
        return HOLE not in parent.window_ids[first : self.blocks_for(computed)]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share the prompt's blocks of `parent`, which has computed it, with a choice that holds nothing yet.

        All but the child's last known token count as computed, so the child computes at least that one by itself.
        """
        computed = _computed_by_fork(child)
        full, rest = divmod(computed, self.block_size)
        for pool, ids, own in zip(self.pools, self.tables(parent), self.tables(child), strict=True):
            own.extend(ids[: self.blocks_for(computed)])
            for block_id in held(own):
                pool.share(block_id)
        child.chain = parent.chain[:full]
        child.shares_last = rest > 0
        child.num_computed_tokens = computed
        child.num_cached_tokens = max(child.num_cached_tokens, 0)
        self._replaced(child)
        if self.window is not None:
            self.window.let_go(child)

    def enter(self, sequence: Sequence) -> None:
        """Let the cache find the blocks that are full now. Only for what is committed and was finite.

        If another block with the same content is there already, the sequence takes that one and lets go of its own: a
        content has one block, and whoever holds an entry's block holds its ancestors'.
        """
        if self.cache is None:
            return
        chain = sequence.chain
        for index in range(len(chain), sequence.num_computed_tokens // self.block_size):
            parent = chain[-1] if chain else None
            entry = self.cache.insert(parent, sequence.token_ids, index, sequence.block_ids[index], sequence.salt)
            if self.window is not None and entry.window_id == HOLE:
                self.cache.attach(entry, sequence.window_ids[index])
            entered = (entry.block_id, entry.window_id)
            for pool, ids, block_id in zip(self.pools, self.tables(sequence), entered, strict=False):
                if (own := ids[index]) == block_id:
                    pool.keep(own)
                else:
                    pool.share(block_id)
                    pool.release((own,), sequence.last_step)
                    ids[index] = block_id
                    self._replaced(sequence)
            chain.append(entry)

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back, tail first; they come free once the last step that writes them is retired."""
        for pool, ids in zip(self.pools, self.tables(sequence), strict=True):
            pool.release(held(ids), sequence.last_step)
        sequence.block_ids, sequence.window_ids = [], []
        sequence.chain = []
        sequence.shares_last = False
        sequence.num_computed_tokens = 0
        self._replaced(sequence)

    def retire(self, step: int) -> None:
        """Step `step` and all before it are committed and write no more."""
        for pool in self.pools:
            pool.retire(step)

    def _owns_shared(self, number: int, sequence: Sequence) -> bool:
        """Whether the shared last block is meanwhile this sequence's alone, and nobody can find it: no copy needed."""
        pool = self.pools[number]
        block_id = self.tables(sequence)[number][sequence.num_computed_tokens // self.block_size]
        return pool.refs[block_id] == 1 and not pool.is_findable(block_id)

    def _replaced(self, sequence: Sequence) -> None:
        sequence.num_slots = self.slots_of(sequence)
        sequence.epoch += 1

    def _forget(self, block_id: int) -> None:
        if self.cache is not None and (window_id := self.cache.forget(block_id)) != HOLE:
            self.pools[1].lose(window_id)

    def _forget_window(self, window_id: int) -> None:
        if self.cache is not None:
            self.cache.detach(window_id)


def _computed_by_fork(child: Sequence) -> int:
    return min(child.num_prompt_tokens, child.num_tokens - 1)
