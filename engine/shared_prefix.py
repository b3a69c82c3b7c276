"""Which sequences of a step run on the same blocks, so that attention reads these once for all of them.

Only sequences with one token in the step count. What they share is measured in splits of the attention kernel, from
position 0 on: a run of blocks is shared by those whose block ids there, and everywhere before, are the same. The
sequences form a tree,

    ────────┬──────── A          0 … 512   shared by A, B and C
            └───┬──── B        512 … 768   by B and C
                └──── C

and each takes part in one tile only: of all ways to cut the tree, the one that saves the most reading is taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.attention import SharedPrefix
from ..kernels.backend import Backend
from .types import ScheduledRow


@dataclass(frozen=True, slots=True)
class Sharing:
    """What an attention kernel can do of it."""

    split: int  # positions: only whole splits are shared
    per_tile: int  # the most sequences that are read for together


def sharing_of(backend: Backend, positions: int, block_size: int, queries_per_kv_head: int) -> Sharing | None:
    """What a backend can do for sequences that have room for so many positions.

    None where nothing is gained, and where its splits do not consist of whole blocks.
    """
    if backend.sharing is None:
        return None
    split, per_tile = backend.sharing(positions, queries_per_kv_head)
    return Sharing(split, per_tile) if per_tile > 1 and split < positions and not split % block_size else None


class Tile(NamedTuple):
    """Sequences that share their first `num_splits` splits."""

    numbers: tuple[int, ...]  # in the step
    num_splits: int


@dataclass(slots=True, eq=False)
class Node:
    """A split of some sequences that are alike up to its end."""

    depth: int  # splits up to its end
    parent: Node | None
    blocks: tuple[int, ...]
    num_sequences: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict[tuple[int, ...], "Node"])


class PrefixGroups:
    """Finds the tiles of a step. What it remembers of a sequence grows with it, so a step costs what has changed."""

    def __init__(self, sharing: Sharing, block_size: int, device: torch.device) -> None:
        if sharing.split % block_size:
            raise ValueError(f"splits of {sharing.split} positions do not consist of whole blocks of {block_size}")
        self._sharing = sharing
        self._per_split = sharing.split // block_size
        self._device = device
        self._root = Node(0, None, ())
        self._paths: dict[tuple[int, int], list[Node]] = {}  # of a sequence's serial and epoch
        self._key: list[tuple[int, int, int]] = []
        self._found: SharedPrefix | None = None

    def find(self, rows: List[ScheduledRow]) -> SharedPrefix | None:
        """Tensors for the attention kernel; None where nothing is shared."""
        split = self._sharing.split
        key = [
            (row.sequence.serial, row.sequence.epoch, row.start // split if row.num_tokens == 1 else 0) for row in rows
        ]
        if key != self._key:
            self._key = key
            for gone in self._paths.keys() - {(serial, epoch) for serial, epoch, depth in key if depth}:
                self._forget(self._paths.pop(gone))
            for row, (serial, epoch, depth) in zip(rows, key, strict=True):
                path = self._paths.get((serial, epoch))
                if depth and (path is None or len(path) < depth):
                    self._follow(self._paths.setdefault((serial, epoch), []), row.sequence.block_ids, depth)
            self._found = self._tensors(cut(self._shared_by(key)), len(rows))
        return self._found

    def _follow(self, path: list[Node], block_ids: list[int], depth: int) -> None:
        size = self._per_split
        for at in range(len(path), depth):
            parent = path[-1] if path else self._root
            blocks = tuple(block_ids[at * size : (at + 1) * size])
            node = parent.children.setdefault(blocks, Node(at + 1, parent, blocks))
            node.num_sequences += 1
            path.append(node)

    def _forget(self, path: list[Node]) -> None:
        for node in reversed(path):
            node.num_sequences -= 1
            if not node.num_sequences and node.parent is not None:
                del node.parent.children[node.blocks]

    def _shared_by(self, key: List[tuple[int, int, int]]) -> dict[Node, list[int]]:
        """Numbers of the sequences by the last split that they share with others."""
        shared: defaultdict[Node, list[int]] = defaultdict(list)
        for number, (serial, epoch, depth) in enumerate(key):
            if depth:
                path = self._paths[serial, epoch]
                count = bisect_left(path, True, key=_is_alone)
                if count:
                    shared[path[count - 1]].append(number)
        return shared

    def _tensors(self, tiles: List[Tile], count: int) -> SharedPrefix | None:
        most = self._sharing.per_tile
        parts = [
            Tile(tile.numbers[at : at + most], tile.num_splits)
            for tile in tiles
            for at in range(0, len(tile.numbers), most)
            if len(tile.numbers) - at > 1  # one left over reads for itself
        ]
        if not parts:
            return None
        seqs = np.full((len(parts), most), -1, np.int32)
        lengths, own_from = np.zeros(len(parts), np.int32), np.zeros(count, np.int32)
        for place, (numbers, num_splits) in enumerate(parts):
            seqs[place, : len(numbers)] = numbers
            lengths[place] = num_splits * self._sharing.split
            own_from[list(numbers)] = lengths[place]
        return SharedPrefix(*(torch.as_tensor(each, device=self._device) for each in (seqs, lengths, own_from)))


def _is_alone(node: Node) -> bool:
    return node.num_sequences < 2


@dataclass(frozen=True, slots=True, eq=False)
class _Fork:
    """A node at which sequences end to share, or part."""

    depth: int
    ends: tuple[int, ...]
    branches: tuple[_Fork, ...]


class _Way(NamedTuple):
    """One way to cut what is below a fork."""

    saved: int  # reads of a split
    tiles: tuple[Tile, ...]
    left: tuple[int, ...]  # in none of these tiles


def cut(shared: Mapping[Node, List[int]]) -> list[Tile]:
    """Choose tiles of two sequences and more, so that as many reads of a split as can be are saved.

    shared gives the numbers of the sequences whose last split that others have too is a node.

    A tile reads its splits once and saves them for each of its sequences: `depth` reads for each, less `depth`. A
    sequence may as well be in the tile of a node further up, where it saves less: for each node, the best way is found
    with and without a tile of its own, for each depth that a tile above may have.
    """
    known: dict[tuple[_Fork, int], _Way] = {}

    def best(fork: _Fork, above: int) -> _Way:
        """The best way below a fork if a tile of depth `above` takes those who are left."""
        if (fork, above) not in known:
            way = _together([best(branch, above) for branch in fork.branches], fork.ends, above)
            if fork.depth > above:
                own = _together([best(branch, fork.depth) for branch in fork.branches], fork.ends, fork.depth)
                if own.saved - fork.depth > way.saved:
                    tile = Tile(tuple(sorted(own.left)), fork.depth)
                    way = _Way(own.saved - fork.depth, (*own.tiles, tile), ())
            known[fork, above] = way
        return known[fork, above]

    return [tile for root in _forks(shared) for tile in best(root, 0).tiles if len(tile.numbers) > 1]


def _together(ways: List[_Way], ends: tuple[int, ...], depth: int) -> _Way:
    saved, tiles, left = len(ends) * depth, list[Tile](), list(ends)
    for way in ways:
        saved += way.saved
        tiles += way.tiles
        left += way.left
    return _Way(saved, tuple(tiles), tuple(left))


def _forks(shared: Mapping[Node, List[int]]) -> list[_Fork]:
    """The tree above these nodes, without the nodes at which nothing happens; one for each prefix."""
    below: defaultdict[Node | None, dict[Node, None]] = defaultdict(dict)  # sets that keep their order
    for found in shared:
        node: Node | None = found
        while node is not None and node.depth and node not in below[node.parent]:
            below[node.parent][node] = None
            node = node.parent

    def fork(node: Node) -> _Fork:
        while node not in shared and len(below[node]) == 1:
            (node,) = below[node]
        return _Fork(node.depth, tuple(shared.get(node, ())), tuple(fork(child) for child in below[node]))

    tops = [node for node in below if node is not None and node.depth == 0]
    return [fork(child) for top in tops for child in below[top]]
