"""Packing of tokenised documents into rows of equal length.

A row always begins where a document begins, as a prompt does, and no document is cut: the model sees both clean starts
and clean ends. What is left over at the end of a row is padding, which the loss skips.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

IGNORED = -100


class Shape(NamedTuple):
    """Rows of one length, and how many of them make a batch."""

    length: int
    rows: int


SHORT = Shape(384, 4)
LONG = Shape(2048, 1)


def pack(documents: Sequence[list[int]], length: int, open_rows: int = 64) -> list[list[int]]:
    """Puts each document into the fullest open row that still has room for it."""
    done: list[list[int]] = []
    rows: list[list[int]] = []
    for document in documents:
        fitting = [row for row in rows if len(row) + len(document) <= length]
        if fitting:
            max(fitting, key=len).extend(document)
            continue
        if len(rows) >= open_rows:
            fullest = max(rows, key=len)
            rows.remove(fullest)
            done.append(fullest)
        rows.append(list(document))
    return done + rows


def batch_of(rows: Sequence[list[int]], length: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input tokens and their targets, one place ahead, with the padding left out of the targets."""
    tokens = torch.full((len(rows), length + 1), padding, dtype=torch.long)
    targets = torch.full((len(rows), length + 1), IGNORED, dtype=torch.long)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        targets[index, : len(row)] = tokens[index, : len(row)]
    return tokens[:, :-1].contiguous(), targets[:, 1:].contiguous()


def batches(
    documents: Sequence[list[int]], padding: int, long_share: float, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One pass over the documents in random order: mostly short rows, and long ones for what fits nowhere else."""
    rng = random.Random(seed)
    by_shape: dict[Shape, list[list[int]]] = {SHORT: [], LONG: []}
    for document in documents:
        goes_long = len(document) > SHORT.length or rng.random() < long_share
        if len(document) <= LONG.length:
            by_shape[LONG if goes_long else SHORT].append(document)
    groups: list[tuple[Shape, list[list[int]]]] = []
    for shape, members in by_shape.items():
        rng.shuffle(members)
        rows = pack(members, shape.length)
        rng.shuffle(rows)
        groups += [(shape, rows[start : start + shape.rows]) for start in range(0, len(rows), shape.rows)]
    rng.shuffle(groups)
    for shape, rows in groups:
        yield batch_of(rows, shape.length, padding)
