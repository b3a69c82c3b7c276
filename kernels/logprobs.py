"""Log-probabilities of chosen tokens and of the best ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .lists import ints

SLICE_ROWS = 32  # rows of the reference that are computed together: bounds its memory to 2 · 32 · vocab floats
Pairs = list[tuple[int, float]]  # token ids and natural logarithms of probabilities


def logprobs(scores: torch.Tensor, rows: Sequence[int], chosen: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Take logarithms of the softmax of some rows of `scores`, float32 [all rows, vocab], left alone.

    rows are numbers of rows, ascending; `chosen`, int64 [all rows] on any device, has a token for each row of scores;
    counts says, for each of `rows`, how many best ones to give: as many as there are, if fewer. Those with the better
    scores come first, and of equal scores the lower id, also where only some of the equal ones are given. Score -inf
    gives -inf; a row with a NaN, or whose best is infinite, NaN. No row's result depends on another.

    Result: int32 [rows, 1 + 2 · width] on the device of the scores, of which `pairs` makes lists; width is the largest
    count, at most vocab: the bits of the chosen token's, float32; ids of the best; the bits of theirs. What is behind
    a row's own count is anything.
    """
    width = width_of(counts, scores.shape[1])
    found = torch.empty((len(rows), 1 + 2 * width), dtype=torch.int32, device=scores.device)
    for begin in range(0, len(rows), SLICE_ROWS):
        end = min(begin + SLICE_ROWS, len(rows))
        _slice(scores, rows[begin:end], chosen, counts[begin:end], found[begin:end])
    return found


def width_of(counts: Sequence[int], vocab: int) -> int:
    """How many best ones a result has room for."""
    return min(max(counts, default=0), vocab)


def _slice(
    scores: torch.Tensor, rows: Sequence[int], chosen: torch.Tensor, counts: Sequence[int], found: torch.Tensor
) -> None:
    first, end = rows[0], rows[-1] + 1
    together = end - first == len(rows)
    own = scores[first:end] if together else scores[list(rows)]
    tokens = (chosen[first:end] if together else chosen[list(rows)]).to(scores.device)
    table = torch.log_softmax(own, dim=-1)
    numbers = found.view(torch.float32)
    numbers[:, :1] = table.gather(1, tokens.unsqueeze(1))
    width = (found.shape[1] - 1) // 2
    for count in sorted(set(counts) - {0}):  # how another row's equal ones are found must not depend on this one
        members = [at for at, one in enumerate(counts) if one == count]
        each = torch.tensor(members, device=scores.device)
        best = _best(own if len(members) == len(rows) else own[each], min(count, own.shape[1]))
        found[each, 1 : 1 + best.shape[1]] = best.int()
        numbers[each, 1 + width : 1 + width + best.shape[1]] = table[each.unsqueeze(1), best]


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` best scores of each row, int64 [rows, count], in order."""
    top = scores.topk(min(count + 1, scores.shape[1]))
    best = top.indices[:, :count]
    equal = top.values[:, 1:] == top.values[:, :-1]
    if equal.any():
        for row in ints(equal.any(dim=1).nonzero().squeeze(1)):
            last = top.values[row, count - 1]  # there may be more of these than have a place
            ids = torch.cat((best[row, top.values[row, :count] > last], (scores[row] == last).nonzero().squeeze(1)))
            ids = ids[:count].sort().values
            best[row] = ids[scores[row, ids].sort(descending=True, stable=True).indices]
    return best


def pairs(found: torch.Tensor, counts: Sequence[int]) -> list[tuple[float, Pairs]]:
    """Bring a result to the host: for each row the chosen token's, and (id, log-probability) of the best ones."""
    width = (found.shape[1] - 1) // 2
    on_host: Any = found.cpu()
    ids: list[list[int]] = on_host[:, 1 : 1 + width].tolist()
    numbers: list[list[float]] = on_host.view(torch.float32).tolist()
    return [
        (values[0], list(zip(tokens[:count], values[1 + width : 1 + width + count], strict=True)))
        for tokens, values, count in zip(ids, numbers, counts, strict=True)
    ]
