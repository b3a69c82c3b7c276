"""Stop strings in text that comes in pieces, across and inside tokens, in linear time.

One automaton (Aho and Corasick, "Efficient string matching", 1975, doi:10.1145/360825.360855) for all stop strings of
a request; a `StopMatcher` is one text's place in it. The result does not depend on how the text is cut.

The match is the one that completes first; of several that complete at the same character, the longest. Held back is
exactly the longest end of the text that could still grow into a stop string, never more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# All stop strings of a request together. The automaton takes about 150 bytes and a microsecond a character to build.
MAX_STOP_CHARS = 65_536

_BITS = 21  # a code point fits


@dataclass(frozen=True, slots=True)
class StopAutomaton:
    """The compiled stop strings. State 0 is the root; a state stands for the longest stop prefix that the text ends in.

    `edges` maps `state << 21 | code point` to the next state down the trie; `fail[s]` is the state of the next shorter
    prefix; `match[s]` the longest stop string that the text ends in at `s` ("" if none); `held[s]` the number of
    characters that may still become part of a stop string.
    """

    edges: dict[int, int]
    fail: list[int]
    match: list[str]
    held: list[int]
    begins: re.Pattern[str]  # any character that begins a stop string


def compile_stops(stops: tuple[str, ...], max_chars: int = MAX_STOP_CHARS) -> StopAutomaton:
    """Build the automaton. Raises ValueError for an empty stop string, or more than `max_chars` altogether."""
    if "" in stops:
        raise ValueError("a stop string must not be empty")
    if sum(map(len, stops)) > max_chars:
        raise ValueError(f"the stop strings have more than {max_chars} characters together")
    edges: dict[int, int] = {}
    match, depth, order = [""], [0], [(0, 0, 0)]  # order: (state, parent, code point)
    for stop in stops:
        state = 0
        for char in stop:
            key = state << _BITS | ord(char)
            if key not in edges:
                edges[key] = len(match)
                order.append((len(match), state, ord(char)))
                match.append("")
                depth.append(depth[state] + 1)
            state = edges[key]
        match[state] = stop
    # Shorter prefixes first, so that whatever a state fails to is already complete.
    order.sort(key=lambda entry: depth[entry[0]])
    fail, held = [0] * len(match), [0] * len(match)
    inner = {parent for _, parent, _ in order[1:]}
    for state, parent, code in order[1:]:
        back = fail[parent]
        while back and back << _BITS | code not in edges:
            back = fail[back]
        fail[state] = edges.get(back << _BITS | code, 0) if parent else 0
        match[state] = match[state] or match[fail[state]]
        held[state] = depth[state] if state in inner else held[fail[state]]
    begins = re.compile("[" + "".join(re.escape(char) for char in sorted({stop[0] for stop in stops})) + "]")
    return StopAutomaton(edges, fail, match, held, begins)


def contains_any(automaton: StopAutomaton, text: str) -> bool:
    """Whether any of the compiled strings is in the text."""
    state, _ = scan(automaton, 0, text)
    return bool(automaton.match[state])


def scan(automaton: StopAutomaton, state: int, text: str, counts: bool = True) -> tuple[int, int]:
    """Move on from `state` through the text up to its end or, with `counts`, the end of the first match.

    Gives (the new state, characters read).
    """
    edges, fail, match = automaton.edges, automaton.fail, automaton.match
    i, size = 0, len(text)
    while i < size:
        if not state:  # nothing begun: go straight to where something may begin
            begin = automaton.begins.search(text, i)
            if begin is None:
                return 0, size
            i = begin.start()
        code = ord(text[i])
        i += 1
        while (following := edges.get(state << _BITS | code)) is None and state:
            state = fail[state]
        state = following or 0
        if counts and match[state]:
            break
    return state, i


class StopMatcher:
    """Looks for stop strings in one text. Without stop strings every text passes at once."""

    __slots__ = ("_automaton", "_held", "_include_stop", "_state", "stop")

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        """Raises ValueError as `compile_stops` does. For further texts with the same stop strings use `fresh`."""
        self._automaton = compile_stops(stops) if stops else None
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.stop: str | None = None  # the stop string found; from then on nothing more comes out

    @property
    def active(self) -> bool:
        """Whether there is anything to look for."""
        return self._automaton is not None

    def fresh(self) -> StopMatcher:
        """A matcher for another text that shares this one's automaton."""
        other = StopMatcher((), self._include_stop)
        other._automaton = self._automaton
        return other

    def push(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """Take further text; give (text that is now final, the stop string if it has just been found).

        With `counts` false no stop string that ends in this text is a match; one that began in it and ends later is.
        Text after a match is dropped, in this call and in all later ones.
        """
        automaton = self._automaton
        if automaton is None:
            return text, None
        if self.stop is not None or not text:
            return "", None
        if not self._state and automaton.begins.search(text) is None:
            return text, None  # nothing is held and nothing begins: most of all texts
        self._state, end = scan(automaton, self._state, text, counts)
        text = self._held + text[:end]
        if counts and (stop := automaton.match[self._state]):
            self.stop, self._held = stop, ""
            return (text if self._include_stop else text[: len(text) - len(stop)]), stop
        num_final = len(text) - automaton.held[self._state]
        self._held = text[num_final:]
        return text[:num_final], None

    def flush(self) -> str:
        """The end of the text: give what was held back."""
        text, self._held, self._state = self._held, "", 0
        return text
