"""Which sequences of a step run on the same blocks, so that attention reads these once for all of them.

Only sequences with one token in the step count. What they share is measured in splits of the attention kernel, from
position 0 on: a run of blocks is shared by those whose block ids there, and everywhere before, are the same. The
sequences form a tree,

    ────────┬──────── A          0 … 512   shared by A, B and C
            ├───┬──── B        512 … 768   by B and C
            └   └──── C

and each takes part in one tile only: of all ways to cut the tree, the one that saves the most reading is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.attention import SharedPrefix
from .types import ScheduledRow


@dataclass(frozen=True, slots=True)
class Sharing:
    """What an attention kernel can do of it."""

    split: int  # positions: only whole splits are shared
    per_tile: int  # the most sequences that are read for together


class Tile(NamedTuple):
    """Sequences that share their first `num_splits` splits."""

    numbers: tuple[int, ...]  # in the step
    num_splits: int


class Member(NamedTuple):
    """A sequence, as far as sharing goes."""

    number: int  # in the step
    splits: list[tuple[int, ...]]  # block ids of each split that lies wholly before the sequence's last position


class PrefixGroups:
    """Finds the tiles of a step, anew only when a sequence came, went or filled a split."""

    def __init__(self, sharing: Sharing, block_size: int, device: torch.device) -> None:
        if sharing.split % block_size:
            raise ValueError(f"splits of {sharing.split} positions do not consist of whole blocks of {block_size}")
        self._sharing = sharing
        self._per_split = sharing.split // block_size
        self._device = device
        self._key: list[tuple[int, int, int]] = []
        self._found: SharedPrefix | None = None

    def find(self, rows: List[ScheduledRow]) -> SharedPrefix | None:
        """Tensors for the attention kernel; None where nothing is shared. Valid until the next call."""
        split = self._sharing.split
        key = [
            (row.sequence.serial, row.sequence.epoch, row.start // split if row.num_tokens == 1 else 0) for row in rows
        ]
        if key != self._key:
            self._key = key
            counts = [depth for _, _, depth in key]
            members = [self._member(number, row, counts[number]) for number, row in enumerate(rows) if counts[number]]
            self._found = self._tensors(cut(members), len(rows)) if len(members) > 1 else None
        return self._found

    def _member(self, number: int, row: ScheduledRow, num_splits: int) -> Member:
        ids, size = row.sequence.block_ids, self._per_split
        return Member(number, [tuple(ids[at * size : (at + 1) * size]) for at in range(num_splits)])

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


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """Sequences that share their first `depth` splits, and no more of them all."""

    depth: int
    ends: tuple[int, ...]  # numbers of those that share nothing more with any other
    branches: tuple[_Node, ...]  # those that share the next split as well


class _Way(NamedTuple):
    """One way to cut what is below a node."""

    saved: int  # reads of a split
    tiles: tuple[Tile, ...]
    left: tuple[int, ...]  # in none of these tiles


def cut(members: List[Member]) -> list[Tile]:
    """Choose tiles of two sequences and more, so that as many reads of a split as can be are saved.

    A tile reads its splits once and saves them for each of its sequences: `depth` reads for each, less `depth`. A
    sequence may as well be in the tile of a node further up, where it saves less: for each node, the best way is found
    with and without a tile of its own, for each depth that a tile above may have.
    """
    known: dict[tuple[_Node, int], _Way] = {}

    def best(node: _Node, above: int) -> _Way:
        """The best way below a node if a tile of depth `above` takes those who are left."""
        if (node, above) not in known:
            plain = _together([best(branch, above) for branch in node.branches], node.ends, above)
            way = plain
            if node.depth > above:
                own = _together([best(branch, node.depth) for branch in node.branches], node.ends, node.depth)
                if own.saved - node.depth > plain.saved:
                    way = _Way(own.saved - node.depth, (*own.tiles, Tile(tuple(sorted(own.left)), node.depth)), ())
            known[node, above] = way
        return known[node, above]

    return [tile for tile in best(_tree(list(members), 0), 0).tiles if len(tile.numbers) > 1]


def _together(ways: List[_Way], ends: tuple[int, ...], depth: int) -> _Way:
    left = sum((way.left for way in ways), ends)
    return _Way(sum(way.saved for way in ways) + len(ends) * depth, sum((way.tiles for way in ways), ()), left)


def _tree(group: list[Member], depth: int) -> _Node:
    """Sort sequences that share their first `depth` splits."""
    while True:  # along what all of them share
        branches: defaultdict[tuple[int, ...], list[Member]] = defaultdict(list)
        for member in group:
            if len(member.splits) > depth:
                branches[member.splits[depth]].append(member)
        alike = [branch for branch in branches.values() if len(branch) > 1]
        if not alike or len(alike[0]) < len(group):
            break
        depth += 1
    apart = {id(member) for branch in alike for member in branch}
    ends = tuple(member.number for member in group if id(member) not in apart)
    return _Node(depth, ends, tuple(_tree(branch, depth + 1) for branch in alike))
