"""The text of one choice: ids in, final text out, stop strings found.

What comes out, and what is held back, is a function of the ids fed so far and never of how they were cut into calls.
So a worker that goes on with another's attempt replays the settled ids through a fresh `ChoiceText` and is exactly
where the other was: in the middle of a character, or of a stop string.

`min_tokens`: a stop string counts only if its last character was made final by a token whose number in the output,
from 1, is greater than `min_tokens` (as for EOS, which is first allowed there). One that ends earlier is passed over;
one that begins earlier and ends later counts.

Half a character left at the very end becomes U+FFFD there; no token made it final, so it completes no stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .stop_strings import StopMatcher
from .types import Detokenizer


class TextChunk(NamedTuple):
    """What a call of `feed` gave. A named tuple, since one is made for every token."""

    text: str  # whole characters, final; may be empty
    stop: str | None = None  # the stop string found in this call
    stop_index: int | None = None  # tokens of the whole output up to the one that completed it; later ones do not count


@dataclass(frozen=True, slots=True)
class ReplayedText:
    """What an earlier attempt has made of its ids."""

    text: str  # what it had published; what it held back is not in here and comes out later
    num_tokens: int  # settled ids replayed
    stop: str | None = None  # the settled ids already hold this stop string: the choice has ended
    stop_index: int | None = None  # as in TextChunk


class ChoiceText:
    """Combines a fresh detokenizer and a fresh matcher. Not for use by several threads at once."""

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_stops", "num_tokens")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._stops = matcher.active
        self._min_tokens = min_tokens
        self.num_tokens = 0  # of the output, as far as it was taken: nothing is after a stop string

    def feed(self, token_ids: Sequence[int]) -> TextChunk:
        """Take further sampled ids, all of them, EOS and stop tokens too. After a stop string nothing more is taken."""
        if not self._stops:
            self.num_tokens += len(token_ids)
            return TextChunk(self._detokenizer.push(tuple(token_ids)))
        if self._matcher.stop is not None:
            return TextChunk("")
        out: list[str] = []
        for token_id in token_ids:
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            final, stop = self._matcher.push(text, counts=self.num_tokens > self._min_tokens)
            out.append(final)
            if stop is not None:
                return TextChunk("".join(out), stop, self.num_tokens)
        return TextChunk("".join(out))

    def replay(self, settled_ids: Sequence[int]) -> ReplayedText:
        """Go through what an earlier attempt has settled, whose text is already published. Before any `feed`."""
        chunk = self.feed(settled_ids)
        return ReplayedText(chunk.text, self.num_tokens, chunk.stop, chunk.stop_index)

    def end(self) -> str:
        """The end of the output: what was held back. Not when another attempt is to go on with this choice."""
        if self._matcher.stop is not None:
            return ""
        # What the matcher holds precedes the half character that the detokenizer holds.
        return self._matcher.flush() + self._detokenizer.flush()
