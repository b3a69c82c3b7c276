"""The sequences that hold no blocks: the line, in the order of admission, and those that wait for a sibling.

The smallest priority goes first; within a priority those that were preempted, then by arrival. Every eighth admission
is for whoever heads its priority and came first of these heads, whatever its priority is, and while it does not fit
nobody is let in before it: so a sequence with `w` older ones in line waits for at most `8 * (w + 1)` admissions
(preempted ones that come back are counted among the older ones).

Of the choices of one request only the leader is in line; the others wait until it has computed the prompt they share.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from .sequence import Sequence, State

FAIR_EVERY = 8


def _place(sequence: Sequence) -> tuple[bool, int]:
    return (not sequence.preempted, sequence.arrival)


class WaitingLine:
    """Sequences in states WAITING and DEPENDENT; it sets these states. `preempted` must not change while in line."""

    def __init__(self) -> None:
        self._lines: dict[int, list[Sequence]] = {}  # priority → sequences in order; no list is empty
        self.led: dict[str, tuple[Sequence, list[Sequence]]] = {}  # request id → the leader, who waits for it
        self._admitted = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for priority in sorted(self._lines):
            yield from self._lines[priority]

    def sequences(self) -> Iterator[Sequence]:
        """Yield those in line and those who wait for a sibling."""
        yield from self
        for _, followers in self.led.values():
            yield from followers

    @property
    def num_following(self) -> int:
        """Sequences that wait for a sibling."""
        return sum(len(followers) for _, followers in self.led.values())

    def add_request(self, choices: list[Sequence]) -> None:
        """Take the choices of one request: the first leads, the others follow."""
        leader, *followers = choices
        self.add(leader)
        if followers:
            for sequence in followers:
                sequence.state = State.DEPENDENT
            self.led[leader.request_id] = (leader, followers)

    def add(self, sequence: Sequence) -> None:
        """Join the line, each at its own place."""
        sequence.state = State.WAITING
        insort(self._lines.setdefault(sequence.priority, []), sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        """Leave without having been admitted."""
        if sequence.state is State.DEPENDENT:
            leader, followers = self.led[sequence.request_id]
            followers.remove(sequence)
            if not followers:
                del self.led[leader.request_id]
            return
        line = self._lines[sequence.priority]
        del line[bisect_left(line, _place(sequence), key=_place)]
        if not line:
            del self._lines[sequence.priority]

    def admit(self, sequence: Sequence) -> None:
        """Leave the line with blocks; it counts for the eighth."""
        self.remove(sequence)
        sequence.preempted = False
        self._admitted += 1

    def leads(self, sequence: Sequence) -> bool:
        """Whether others wait for this one to compute the prompt."""
        group = self.led.get(sequence.request_id)
        return group is not None and group[0] is sequence

    def followers(self, leader: Sequence) -> list[Sequence]:
        """Give those who waited for `leader`, which has computed the prompt; the caller finds a place for each."""
        return self.led.pop(leader.request_id)[1]

    def succeed(self, leader: Sequence) -> None:
        """Put the next in line in place of a leader that ended before its prompt was computed."""
        _, (successor, *followers) = self.led.pop(leader.request_id)
        self.add(successor)
        if followers:
            self.led[leader.request_id] = (successor, followers)

    def head(self) -> Sequence | None:
        """Return who is to be admitted next, None if nobody waits."""
        if not self._lines:
            return None
        if (self._admitted + 1) % FAIR_EVERY == 0:
            return min((line[0] for line in self._lines.values()), key=lambda sequence: sequence.arrival)
        return self._lines[min(self._lines)][0]

    def goes_before(self, sequence: Sequence) -> bool:
        """Whether anybody in line would be admitted before `sequence`, were it in line too."""
        head = self.head()
        return head is not None and (head.priority, _place(head)) < (sequence.priority, _place(sequence))

    def check(self) -> None:
        """Prove order and states. Raises RuntimeError."""
        for priority, line in self._lines.items():
            places = [_place(sequence) for sequence in line]
            if not line or places != sorted(set(places)):
                raise RuntimeError(f"the line of priority {priority} is not in order: {places}")
        for place, sequence in enumerate(self.sequences()):
            state = State.WAITING if place < len(self) else State.DEPENDENT
            held = (*sequence.block_ids, *sequence.chain, sequence.num_computed_tokens, sequence.shares_last)
            if sequence.state is not state or any(held):
                raise RuntimeError(f"{sequence.request_id}/{sequence.choice} waits as {sequence.state} with blocks")
        if not all(followers for _, followers in self.led.values()):
            raise RuntimeError("a leader without followers is kept")
