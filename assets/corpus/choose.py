"""Random choices with favourites.

A uniform choice among twenty words leaves a trained model with twenty near-equal candidates, so its greedy text would
hang on rounding errors. Here every list has a clear favourite (weights fall like a Zipf law), and which one it is
depends on a "style", so that greedy stories still differ from one subject to the next.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

STYLES = 5
SKEW = 1.6


def style_of(subject: str) -> int:
    """The style a subject's stories are written in: a stable hash, so that a model can learn it."""
    return zlib.crc32(subject.encode()) % STYLES


class Chooser:
    """A seeded source of choices, either even ones or ones with a favourite."""

    def __init__(self, rng: random.Random, style: int = 0) -> None:
        self.rng = rng
        self.style = style

    def styled(self, subject: str) -> Chooser:
        """The same random source, with the favourites that belong to `subject`."""
        return Chooser(self.rng, style_of(subject))

    def even(self, options: Sequence[T]) -> T:
        """An even choice: for what a prompt supplies, and the model has only to copy."""
        return self.rng.choice(options)

    def pick(self, options: Sequence[T]) -> T:
        """A choice with a favourite: for what the model itself has to decide."""
        weights = [(rank + 1.0) ** -SKEW for rank in range(len(options))]
        rank = self.rng.choices(range(len(options)), weights)[0]
        return options[(rank + self.style) % len(options)]

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.rng.random() < probability
