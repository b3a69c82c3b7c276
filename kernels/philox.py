"""Counter-based random numbers: the same bits for the same arguments, on any device and in any batch."""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10
_SPREAD, _LANES = 64, 16  # one counter serves four tokens, 16 apart: vectors of 16 neighbours use one word each


def philox(key: tuple[int, int], counter: tuple[torch.Tensor, int, int, int]) -> tuple[torch.Tensor, ...]:
    """Give the four words of philox4x32-10 for each element of the counter's first word.

    Words are unsigned 32-bit numbers in int64 tensors of the shape of counter[0].
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, https://doi.org/10.1145/2063384.2063405
    """
    c0 = counter[0]
    c1, c2, c3 = (torch.full_like(c0, word) for word in counter[1:])
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap, which leaves their 64 bits right; the mask undoes the shift's sign extension
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((second >> 32) & _LOW) ^ c1 ^ k0, ((first >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = second & _LOW, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def token_words(seed: int, choice: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """One random word for each token id (int64 [n], not negative): a function of the four arguments and nothing else.

    The seed (64 bits) is the key. The counter is (the token's place in its group of 64, position, choice, 0); the
    result is int64 [n], each in [0, 2³²).
    """
    place = (token_ids // _SPREAD) * _LANES + token_ids % _LANES
    words = torch.stack(philox((seed & _LOW, (seed >> 32) & _LOW), (place, position & _LOW, choice & _LOW, 0)))
    return words.gather(0, ((token_ids % _SPREAD) // _LANES).unsqueeze(0)).squeeze(0)
