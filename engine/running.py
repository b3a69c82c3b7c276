"""The sequences that hold blocks: who decodes in which turn, who prefills in which order, who gives way."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping

from .sequence import Sequence, State


def rank(sequence: Sequence) -> tuple[int, int]:
    """Smaller goes first, larger gives way: priority, then arrival."""
    return (sequence.priority, sequence.arrival)


class RunningSet:
    """Sequences in state RUNNING, which `join` sets. Those in `decoding` have exactly one token left to compute."""

    def __init__(self) -> None:
        self.decoding: dict[Sequence, None] = {}  # the least recently scheduled first
        self.prefilling: list[Sequence] = []  # by rank

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.decoding
        yield from self.prefilling

    def join(self, sequence: Sequence) -> None:
        """Take a sequence that has its blocks."""
        sequence.state = State.RUNNING
        if sequence.num_tokens - sequence.num_computed_tokens == 1:
            self.decoding[sequence] = None
        else:
            insort(self.prefilling, sequence, key=rank)

    def leave(self, sequence: Sequence) -> None:
        """Let a sequence go; the caller sets its state."""
        if sequence in self.decoding:
            del self.decoding[sequence]
        else:
            self.prefilling.remove(sequence)

    def turn_to_decode(self, sequence: Sequence) -> None:
        """A prefill has one token left."""
        self.prefilling.remove(sequence)
        self.decoding[sequence] = None

    def take_turns(self, scheduled: Mapping[Sequence, object]) -> None:
        """If some decodes were left out of a step, move those that were not behind them."""
        decoding = self.decoding
        if any(sequence not in scheduled for sequence in decoding):
            for sequence in scheduled:
                if sequence in decoding:
                    del decoding[sequence]
                    decoding[sequence] = None

    def newest_of_lowest(self) -> Sequence:
        """Return who gives way when blocks run out."""
        return max(self, key=rank)

    def num_wanted(self, block_size: int) -> int:
        """Return how many blocks, of layers that see all, will be asked for at most within the next `block_size` steps.

        Each sequence may ask for one, unless it has all that it can ever fill (the very last token is not computed),
        for another if it must copy a shared one, and for those that its known tokens lack.
        """
        wanted = 0
        for sequence in self.decoding:
            wanted += (sequence.num_slots < sequence.max_len - 1) + sequence.shares_last
        for sequence in self.prefilling:
            slots = len(sequence.block_ids) * block_size
            lacking = -(-max(0, sequence.num_tokens - slots) // block_size)
            wanted += lacking + (slots + lacking * block_size < sequence.max_len - 1) + sequence.shares_last
        return wanted

    def check(self) -> None:
        """Prove states, order and who lives where. Raises RuntimeError."""
        if any(sequence.state is not State.RUNNING for sequence in self):
            raise RuntimeError("a sequence runs in another state")
        remaining = [sequence.num_tokens - sequence.num_computed_tokens for sequence in self]
        num_decoding = len(self.decoding)
        if any(count != 1 for count in remaining[:num_decoding]) or any(
            count < 2 for count in remaining[num_decoding:]
        ):
            raise RuntimeError(f"{num_decoding} sequences decode, but the tokens to compute are {remaining}")
        if self.prefilling != sorted(self.prefilling, key=rank):
            raise RuntimeError("prefills are not in order")
