"""Who holds which block of the KV cache: reference counts, and the order in which free blocks are used again.

    free  =  blank (never to be found again)  +  kept (still findable by the prefix cache)
    held  =  referenced by a sequence, a planned copy, or a release that waits for its step
    free + held = num_blocks

Blank blocks go first, the last freed first, so that warm memory is used again and no cached block falls while a blank
one lies idle. Kept blocks follow, the least recently freed first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping


class BlockPool:
    """Hands out block ids 0 … num_blocks - 1. Holds no tensors, knows no sequences.

    A release names the last step that may still write the blocks; until `retire` has been called for that step they
    stay held. So a plan may be made while an earlier one still runs, and nobody gets a block that is still written.
    """

    def __init__(self, num_blocks: int, forget: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks  # read-only for others
        self._forget = forget  # told of each kept block that is about to be used again
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: the last one is used next
        self._kept: OrderedDict[int, None] = OrderedDict()  # the first one is used next
        self._findable: set[int] = set()
        self._pending: dict[int, list[int]] = {}  # step → blocks to let go of once it is retired
        self._retired = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give now."""
        return len(self._blank) + len(self._kept)

    @property
    def num_findable(self) -> int:
        """Blocks that the cache can find, held or free."""
        return len(self._findable)

    @property
    def num_pending(self) -> int:
        """References that wait for a step to be retired."""
        return sum(map(len, self._pending.values()))

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, one reference each. Raises RuntimeError if there are fewer (see `num_free`)."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks wanted, {self.num_free} are free")
        taken: list[int] = []
        for _ in range(count):
            if self._blank:
                block_id = self._blank.pop()
            else:
                block_id, _ = self._kept.popitem(last=False)
                self._findable.discard(block_id)
                self._forget(block_id)
            self.refs[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, block_id: int) -> None:
        """Take one more reference to a block that is held or kept."""
        if self.refs[block_id] == 0:
            del self._kept[block_id]
        self.refs[block_id] += 1

    def release(self, block_ids: Iterable[int], step: int) -> None:
        """Let go of one reference each, in the order given; `step` is the last that may still write these blocks.

        Give a sequence's blocks tail first: then the head of a prefix outlives its tail in the cache.
        """
        if step > self._retired:
            self._pending.setdefault(step, []).extend(block_ids)
            return
        for block_id in block_ids:
            self._drop(block_id)

    def retire(self, step: int) -> None:
        """Step `step` and all before it are committed and write no more: what waited for them comes free."""
        self._retired = max(self._retired, step)
        for due in sorted(pending for pending in self._pending if pending <= step):
            for block_id in self._pending.pop(due):
                self._drop(block_id)

    def keep(self, block_id: int) -> None:
        """The cache can find this held block from now on: when nobody holds it, it is kept."""
        self._findable.add(block_id)

    def lose(self, block_id: int) -> None:
        """The cache cannot find this block any more; if nobody holds it, it is blank."""
        self._findable.discard(block_id)
        if block_id in self._kept:
            del self._kept[block_id]
            self._blank.append(block_id)

    def is_findable(self, block_id: int) -> bool:
        """Whether the cache can find this block, so that its content must not change."""
        return block_id in self._findable

    def reuse_order(self) -> tuple[int, ...]:
        """Free block ids, the next to be handed out first."""
        return (*reversed(self._blank), *self._kept)

    def blank_block_ids(self) -> frozenset[int]:
        """Free blocks whose content nobody can ask for: a test may fill them with NaN."""
        return frozenset(self._blank)

    def check(self, claims: Mapping[int, int]) -> None:
        """Prove the books: `claims` gives, per block, how many references its holders have.

        Raises RuntimeError naming the first block that does not add up.
        """
        pending = Counter(block_id for due in self._pending.values() for block_id in due)
        free = Counter(self._blank)
        free.update(self._kept.keys())
        for block_id, refs in enumerate(self.refs):
            claimed = claims.get(block_id, 0) + pending[block_id]
            if refs != claimed:
                raise RuntimeError(f"block {block_id} has {refs} references, its holders claim {claimed}")
            if free[block_id] != (1 if refs == 0 else 0):
                raise RuntimeError(
                    f"block {block_id} with {refs} references is {free[block_id]} times in the free lists"
                )
        if not self._findable.issuperset(self._kept) or not self._findable.isdisjoint(self._blank):
            raise RuntimeError("kept blocks must be findable and blank ones must not be")

    def _drop(self, block_id: int) -> None:
        if self.refs[block_id] <= 0:
            raise RuntimeError(f"block {block_id} is released more often than it is held")
        self.refs[block_id] -= 1
        if self.refs[block_id] == 0:
            if block_id in self._findable:
                self._kept[block_id] = None
            else:
                self._blank.append(block_id)
