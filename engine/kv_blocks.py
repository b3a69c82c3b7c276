"""The blocks that sequences hold: where block pool, prefix cache and sequences meet.

    block_ids   [ found in the cache | own, full and entered | own, still filling | own, empty ]
    chain       [ one entry for each of these ...............]
                0                                            num_computed_tokens // block_size

A block is written only by one sequence, and only at or after its `num_computed_tokens`. Blocks in `chain` are full and
committed, so they may be shared with anybody; of what a sibling shares, only the last block can still be written, and
that is copied first (`shares_last`).

Where every layer has the same window and nothing is cached, blocks that no query can reach any more are let go while a
sequence runs; `block_ids` keeps their places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .block_pool import BlockPool
from .prefix_cache import PrefixCache
from .sequence import Sequence
from .types import ScheduledRow

LET_GO = -1  # stands in `block_ids` for a block that nothing reads any more
SHARE_BLOCKS = 8  # so many blocks are worth a step's wait, if another sequence computes them in it


class KVBlocks:
    """Gives blocks to sequences and takes them back. `cache` None means that nothing is ever found again.

    window  positions that a query sees in every layer, its own included; 0: there are layers that see all
    """

    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache | None, window: int = 0) -> None:
        self.block_size = block_size
        self.cache = cache
        # whoever holds an entry of the cache holds its ancestors, so with a cache nothing is let go before the end
        self.window = window if cache is None else 0
        self.pool = BlockPool(num_blocks, self._forget)
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # of these, found

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence, headroom: int) -> int:
        """Give a sequence blocks for all its known tokens, the cached ones found, or nothing.

        At least one token is always left to compute. Return 0 if it was done, else how many blocks would have to be
        free for it to be done while leaving `headroom` free.
        """
        pool = self.pool
        found = []
        reads = self.cache is not None and not sequence.needs_prompt_logprobs
        if self.cache is not None and reads:
            most = (sequence.num_tokens - 1) // self.block_size
            found = self.cache.match(sequence.token_ids, most, sequence.salt)
        num_new = self.blocks_for(sequence.num_tokens) - len(found)
        num_kept = sum(pool.refs[entry.block_id] == 0 for entry in found)
        needed = num_kept + num_new + headroom
        if needed > pool.num_free:
            return needed
        for entry in found:  # before anything is allocated, which could take the very blocks that were found
            pool.share(entry.block_id)
        sequence.block_ids = [entry.block_id for entry in found]
        sequence.block_ids += pool.allocate(num_new)
        sequence.chain = found
        sequence.num_computed_tokens = len(found) * self.block_size
        self._replaced(sequence)
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        if reads:
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        return 0

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

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many free blocks a sequence needs before its tokens up to `num_tokens` can be written."""
        copies = sequence.shares_last and not self._owns_shared(sequence)
        return max(0, self.blocks_for(num_tokens) - len(sequence.block_ids)) + copies

    def grow(self, sequence: Sequence, num_tokens: int) -> tuple[int, int] | None:
        """Give a sequence what is `missing`; return the block copy (source, destination) to make first, if any.

        The reference to the source stays: the caller releases it once the step that copies is committed.
        """
        copy = None
        if sequence.shares_last:
            if not self._owns_shared(sequence):
                index = sequence.num_computed_tokens // self.block_size
                copy = (sequence.block_ids[index], self.pool.allocate(1)[0])
                sequence.block_ids[index] = copy[1]
                self._replaced(sequence)
            sequence.shares_last = False
        lacking = self.blocks_for(num_tokens) - len(sequence.block_ids)
        if lacking > 0:
            sequence.block_ids += self.pool.allocate(lacking)
            sequence.num_slots = len(sequence.block_ids) * self.block_size
        return copy

    def undo_copy(self, sequence: Sequence, copy: tuple[int, int]) -> None:
        """Take back what `grow` did for a copy that was not made."""
        source, destination = copy
        sequence.block_ids[sequence.num_computed_tokens // self.block_size] = source
        sequence.shares_last = True
        self._replaced(sequence)
        self.pool.release((destination,), 0)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share the prompt's blocks of `parent`, which has computed it, with a choice that holds nothing yet.

        All but the child's last known token count as computed, so the child computes at least that one by itself.
        """
        computed = min(child.num_prompt_tokens, child.num_tokens - 1)
        full, rest = divmod(computed, self.block_size)
        child.block_ids = parent.block_ids[: self.blocks_for(computed)]
        for block_id in _held(child.block_ids):
            self.pool.share(block_id)
        child.chain = parent.chain[:full]
        child.shares_last = rest > 0
        child.num_computed_tokens = computed
        child.num_cached_tokens = max(child.num_cached_tokens, 0)
        self._replaced(child)

    def enter(self, sequence: Sequence) -> None:
        """Let the cache find the blocks that are full now. Only for what is committed and was finite.

        If another block with the same content is there already, the sequence takes that one and lets go of its own: a
        content has one block, and whoever holds an entry's block holds its ancestors'.
        """
        if self.cache is None:
            return
        chain = sequence.chain
        for index in range(len(chain), sequence.num_computed_tokens // self.block_size):
            own = sequence.block_ids[index]
            parent = chain[-1] if chain else None
            entry = self.cache.insert(parent, sequence.token_ids, index, own, sequence.salt)
            if entry.block_id == own:
                self.pool.keep(own)
            else:
                self.pool.share(entry.block_id)
                self.pool.release((own,), sequence.last_step)
                sequence.block_ids[index] = entry.block_id
                self._replaced(sequence)
            chain.append(entry)

    def let_go(self, sequence: Sequence) -> None:
        """Take back the blocks that no query of a sequence can reach any more; what is in flight is waited for."""
        ids, reached = sequence.block_ids, self._out_of_reach(sequence)
        first = reached
        while first > 0 and ids[first - 1] != LET_GO:
            first -= 1
        if first < reached:
            self.pool.release(ids[first:reached], sequence.last_step)
            ids[first:reached] = [LET_GO] * (reached - first)

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back, tail first; they come free once the last step that writes them is retired."""
        self.pool.release(reversed(_held(sequence.block_ids)), sequence.last_step)
        sequence.block_ids = []
        sequence.chain = []
        sequence.shares_last = False
        sequence.num_computed_tokens = 0
        self._replaced(sequence)

    def check(self, running: Iterable[Sequence], copy_sources: Iterable[int]) -> None:
        """Prove that counts, contents and claims agree. Raises RuntimeError naming what does not."""
        claims: Counter[int] = Counter(copy_sources)
        writers: Counter[int] = Counter()
        for sequence in running:
            claims.update(_held(sequence.block_ids))
            self._check_sequence(sequence)
            filling = sequence.num_computed_tokens // self.block_size
            writers.update(sequence.block_ids[filling + sequence.shares_last :])
        self.pool.check(claims)
        for block_id, count in writers.items():
            if count > 1 or self.pool.is_findable(block_id):
                raise RuntimeError(f"block {block_id} has {count} writers, findable: {self.pool.is_findable(block_id)}")
        if self.cache is not None:
            self.cache.check(self.pool.is_findable)

    def _check_sequence(self, sequence: Sequence) -> None:
        name = f"{sequence.request_id}/{sequence.choice}"
        if sequence.num_slots != len(sequence.block_ids) * self.block_size:
            raise RuntimeError(f"{name} has {len(sequence.block_ids)} blocks but {sequence.num_slots} slots")
        if not 0 <= sequence.num_computed_tokens < sequence.num_tokens:
            raise RuntimeError(f"{name} has computed {sequence.num_computed_tokens} of {sequence.num_tokens} tokens")
        if self.blocks_for(sequence.num_computed_tokens) > len(sequence.block_ids):
            raise RuntimeError(f"{name} has computed more than its blocks hold")
        if [entry.block_id for entry in sequence.chain] != sequence.block_ids[: len(sequence.chain)]:
            raise RuntimeError(f"{name} holds other blocks than the cache says")
        if LET_GO in sequence.block_ids[self._out_of_reach(sequence) :]:
            raise RuntimeError(f"{name} has let go of a block that it reads")
        full = sequence.num_computed_tokens // self.block_size
        if self.cache is not None and len(sequence.chain) != full:
            raise RuntimeError(f"{name} has {full} full blocks, {len(sequence.chain)} entered")

    def _out_of_reach(self, sequence: Sequence) -> int:
        """How many of the first blocks no query of a sequence sees any more."""
        return max(0, sequence.num_computed_tokens - self.window + 1) // self.block_size if self.window else 0

    def _owns_shared(self, sequence: Sequence) -> bool:
        """Whether the shared last block is meanwhile this sequence's alone, and nobody can find it: no copy needed."""
        block_id = sequence.block_ids[sequence.num_computed_tokens // self.block_size]
        return self.pool.refs[block_id] == 1 and not self.pool.is_findable(block_id)

    def _replaced(self, sequence: Sequence) -> None:
        sequence.num_slots = len(sequence.block_ids) * self.block_size
        sequence.epoch += 1

    def _forget(self, block_id: int) -> None:
        if self.cache is not None:
            self.cache.forget(block_id)


def _held(block_ids: list[int]) -> list[int]:
    """Those that have not been let go."""
    return [block_id for block_id in block_ids if block_id != LET_GO] if LET_GO in block_ids else block_ids
