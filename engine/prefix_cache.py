"""Which block holds which tokens: a tree of full blocks, found through a chain of keyed hashes.

A block's key/values depend on every token before it, so an entry is (its parent entry, its own token ids); the root of
the tree stands for (salt, adapter). The hash only finds candidates. A hit is one whose parent is the very entry found
before and whose token ids are equal, so no collision can serve foreign text; and the hash is keyed with random bytes of
this process, so nobody can build prompts that collide.

A sequence that holds a block holds all blocks before it, and lets go of them tail first. So an entry's parent always
outlives it: blocks fall from the cache leaf by leaf, and `check` proves it.

Where layers have a window, an entry has a block of theirs besides, as long as that is not used again: it comes and goes
without the entry.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from hashlib import blake2b

BlockHash = Callable[[bytes], bytes]
HOLE = -1  # stands for a block that is not there


def keyed_hash() -> BlockHash:
    """Return a 128-bit hash with a fresh random key."""
    key = os.urandom(32)
    return lambda data: blake2b(data, digest_size=16, key=key).digest()


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One entry, compared by identity; valid while its block is held by somebody or kept in the pool."""

    parent: CachedBlock | None  # None for a root
    digest: bytes  # hash of the parent's digest and the content
    content: bytes  # the token ids, 4 bytes each; of a root: nothing
    block_id: int  # HOLE for a root
    window_id: int = HOLE  # block of the layers with a window
    root_key: tuple[str, str | None] | None = None  # of a root: salt and adapter
    num_children: int = 0


class PrefixCache:
    """Finds blocks by content. Counts no references: the pool does, and calls `forget` for each block it reuses."""

    def __init__(self, block_size: int, block_hash: BlockHash | None = None) -> None:
        self.block_size = block_size
        self._hash = block_hash or keyed_hash()
        self._roots: dict[tuple[str, str | None], CachedBlock] = {}  # only those that have entries below
        self._buckets: dict[bytes, list[CachedBlock]] = {}
        self._entries: dict[int, CachedBlock] = {}  # block id → entry
        self._windows: dict[int, CachedBlock] = {}  # window block id → entry

    def __len__(self) -> int:
        return len(self._entries)

    def match(
        self, token_ids: TokenIds[int], max_blocks: int, salt: str, adapter: str | None = None
    ) -> list[CachedBlock]:
        """Return the entries of the longest cached prefix, at most `max_blocks` of them, the first block first."""
        found: list[CachedBlock] = []
        parent = self._roots.get((salt, adapter))
        while parent is not None and len(found) < max_blocks:
            content = self._content(token_ids, len(found))
            entry = self._find(parent, self._hash(parent.digest + content), content)
            if entry is None:
                break
            found.append(entry)
            parent = entry
        return found

    def insert(
        self,
        parent: CachedBlock | None,
        token_ids: TokenIds[int],
        index: int,
        block_id: int,
        salt: str,
        adapter: str | None = None,
    ) -> CachedBlock:
        """Enter block `index` of `token_ids`, computed into `block_id`; `parent` is the entry of block `index` - 1.

        If another block with this content is there, its entry is returned and `block_id` is not entered.
        """
        if parent is None:
            parent = self._root(salt, adapter)
        content = self._content(token_ids, index)
        digest = self._hash(parent.digest + content)
        entry = self._find(parent, digest, content)
        if entry is None:
            entry = CachedBlock(parent, digest, content, block_id)
            parent.num_children += 1
            self._buckets.setdefault(digest, []).append(entry)
            self._entries[block_id] = entry
        return entry

    def attach(self, entry: CachedBlock, window_id: int) -> None:
        """Give an entry the window block that it lacks."""
        entry.window_id = window_id
        self._windows[window_id] = entry

    def detach(self, window_id: int) -> None:
        """Take a window block from its entry: its content is about to be overwritten."""
        self._windows.pop(window_id).window_id = HOLE

    def forget(self, block_id: int) -> int:
        """Drop a block's entry: its content is about to be overwritten. Return its window block, or HOLE."""
        entry = self._entries.pop(block_id)
        window_id = entry.window_id
        if window_id != HOLE:
            self.detach(window_id)
        bucket = self._buckets[entry.digest]
        bucket.remove(entry)
        if not bucket:
            del self._buckets[entry.digest]
        parent = entry.parent
        if parent is not None:
            parent.num_children -= 1
            if parent.root_key is not None and parent.num_children == 0:
                del self._roots[parent.root_key]
        return window_id

    def check(
        self, is_findable: Callable[[int], bool], is_findable_window: Callable[[int], bool] = lambda _: False
    ) -> None:
        """Prove that entries, buckets, roots and the pools agree and every parent is there. Raises RuntimeError."""
        attached = {entry.window_id: entry for entry in self._entries.values() if entry.window_id != HOLE}
        if attached != self._windows or not all(map(is_findable_window, attached)):
            raise RuntimeError("window blocks of entries and what the pool knows differ")
        children: dict[int, int] = {}
        for block_id, entry in self._entries.items():
            parent = entry.parent
            if entry.block_id != block_id or not is_findable(block_id):
                raise RuntimeError(f"block {block_id} has an entry that the pool does not know")
            if parent is None or not self._is_there(parent):
                raise RuntimeError(f"block {block_id} outlived the block before it")
            if self._find(parent, self._hash(parent.digest + entry.content), entry.content) is not entry:
                raise RuntimeError(f"block {block_id} cannot be found by its content")
            children[id(parent)] = children.get(id(parent), 0) + 1
        for entry in self._everything():
            if entry.num_children != children.get(id(entry), 0):
                raise RuntimeError(f"block {entry.block_id} counts {entry.num_children} children")
        if sum(map(len, self._buckets.values())) != len(self._entries) or not all(self._buckets.values()):
            raise RuntimeError("buckets and entries differ")
        if not all(root.num_children for root in self._roots.values()):
            raise RuntimeError("a salt without entries is kept")

    def _everything(self) -> Iterator[CachedBlock]:
        yield from self._roots.values()
        yield from self._entries.values()

    def _is_there(self, entry: CachedBlock) -> bool:
        if entry.root_key is not None:
            return self._roots.get(entry.root_key) is entry
        return self._entries.get(entry.block_id) is entry

    def _root(self, salt: str, adapter: str | None) -> CachedBlock:
        key = (salt, adapter)
        root = self._roots.get(key)
        if root is None:
            # repr keeps salt "X" and adapter "X" apart; equality of the pair, not this digest, is what decides
            digest = self._hash(repr(key).encode("utf-8", "backslashreplace"))
            root = self._roots[key] = CachedBlock(None, digest, b"", HOLE, root_key=key)
        return root

    def _find(self, parent: CachedBlock, digest: bytes, content: bytes) -> CachedBlock | None:
        for entry in self._buckets.get(digest, ()):
            if entry.parent is parent and entry.content == content:
                return entry
        return None

    def _content(self, token_ids: TokenIds[int], index: int) -> bytes:
        start = index * self.block_size
        return array("i", token_ids[start : start + self.block_size]).tobytes()
