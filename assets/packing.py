"""Batches of tokenised documents.

Most documents have a row to themselves, beside others of nearly the same length. A model this small learns much faster
to take names over from a prompt when no other story stands before it. A few are packed one after the other into long
rows, so that the model also knows far positions, and what may follow an end mark.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

IGNORED = -100
BATCH_TOKENS = 1536
PACKED_LENGTH = 2048


def by_length(documents: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Groups of documents of similar length, each with about as many tokens as a batch should have."""
    group: list[list[int]] = []
    for document in sorted(documents, key=len):
        if group and len(document) * (len(group) + 1) > BATCH_TOKENS:
            yield group
            group = []
        group.append(document)
    if group:
        yield group


def packed(documents: Sequence[list[int]], length: int, open_rows: int = 32) -> list[list[int]]:
    """Rows of whole documents: each goes into the fullest open row that still has room for it."""
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


def batch_of(rows: Sequence[list[int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input tokens and their targets, one place ahead, with the padding left out of the targets."""
    length = max(len(row) for row in rows)
    tokens = torch.full((len(rows), length), padding, dtype=torch.long)
    targets = torch.full((len(rows), length), IGNORED, dtype=torch.long)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        targets[index, : len(row)] = tokens[index, : len(row)]
    return tokens[:, :-1].contiguous(), targets[:, 1:].contiguous()


def batches(
    documents: Sequence[list[int]], padding: int, packed_share: float, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One pass over the documents in random order."""
    rng = random.Random(seed)
    usable = [document for document in documents if len(document) <= PACKED_LENGTH]
    rng.shuffle(usable)
    cut = round(packed_share * len(usable))
    groups = [*by_length(usable[cut:]), *([row] for row in packed(usable[:cut], PACKED_LENGTH))]
    rng.shuffle(groups)
    for group in groups:
        yield batch_of(group, padding)
