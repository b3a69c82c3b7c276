"""Who computes how many tokens in the next step.

    the budget of a step (max_num_batched_tokens)
    [ one token each for those that need one, in turn ........ | prompts and chunks of them ............ ]
                                                                 at least a quarter while any is ready

A step is filled in three passes: decodes up to what is reserved for prefills, prefills (those that have begun and those
in line, by priority and arrival), then decodes again with what is left. Nobody starves:

* decodes beyond the budget take turns, the least recently scheduled first;
* prefills have their quarter, or every other step if the budget is a single token;
* every eighth step begins its chunks with the oldest prefill that has begun, whatever its priority; for those in line
  see `waiting_line`;
* out of blocks, the newest sequence of the lowest priority gives up its blocks and computes them again later. The
  oldest of the highest priority so always goes on, and no request is accepted that the pool cannot hold alone.

Who heads the line but has at least half of its tokens computed by another sequence in this very step, is let in with
the next one and finds them in the cache: of many prompts with one head that come together, one computes it.

An admission takes the blocks of all known tokens at once, and leaves free what the running sequences, itself included,
will ask for within `block_size` steps: it causes no preemption before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .kv_blocks import Copy, KVBlocks, Need
from .kv_check import check_blocks
from .running import RunningSet
from .sequence import Sequence, State
from .types import EngineConfig, Plan, ScheduledRow
from .waiting_line import FAIR_EVERY, WaitingLine

# Steps after which an admission that lacked blocks is tried again even if no more are free. Odd, so that with a budget
# of one token it does not fall on the decodes' turn each time.
RETRY_EVERY = 15


@dataclass(slots=True)
class _Draft:
    """A plan in the making, and then in flight. A sequence that is preempted meanwhile leaves it."""

    step: int
    left: int  # tokens of the budget that are not spent
    rows: dict[Sequence, ScheduledRow] = field(default_factory=dict[Sequence, ScheduledRow])
    copies: dict[Sequence, list[Copy]] = field(default_factory=dict[Sequence, "list[Copy]"])


class Scheduler:
    """Owns the sequences' states and blocks.

    `plan`; after the step `commit` each of its rows, then `retire` it, or `cancel` it if it did not run. Sequences may
    be added and ended at any time between; the blocks of one that ends in flight come free with `retire`. A step may be
    planned while another is in flight: its rows begin where that one's end; the newest is cancelled first.
    """

    def __init__(self, config: EngineConfig, blocks: KVBlocks) -> None:
        self.blocks = blocks
        self.line = WaitingLine()
        self.running = RunningSet()
        self.num_preemptions = 0
        self._max_num_seqs = config.max_num_seqs
        self._budget = config.max_num_batched_tokens
        self._flying: dict[int, _Draft] = {}
        self._step = 0
        self._lacking: tuple[Sequence, Need] | None = None  # who could not be admitted; how many blocks must be free

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self.line) + self.line.num_following

    def sequences(self) -> Iterator[Sequence]:
        """Yield every sequence that has not ended."""
        yield from self.running
        yield from self.line.sequences()

    def room(self) -> int:
        """Return how many more sequences can be let in now; 0 while one waits for blocks."""
        places = self._max_num_seqs - len(self.running) - self.num_waiting
        if places <= 0 or (self._lacking is not None and len(self.line)):
            return 0
        return max(0, min(places, self.blocks.spare(self.blocks.wanted(self.running))))

    def check(self) -> None:
        """Prove that states, order and blocks agree. Raises RuntimeError."""
        if len(self.running) > self._max_num_seqs:
            raise RuntimeError(f"{len(self.running)} sequences run, {self._max_num_seqs} may")
        self.running.check()
        self.line.check()
        copies = [copy for draft in self._flying.values() for made in draft.copies.values() for copy in made]
        check_blocks(self.blocks, tuple(self.running), copies)

    # ------------------------------------------------------------------------------------------------ coming and going

    def add(self, choices: list[Sequence]) -> None:
        """Take the choices of one request: the first computes the prompt, the others wait for that and share it."""
        self.line.add_request(choices)

    def end(self, sequence: Sequence) -> None:
        """Let go of a sequence, in whatever state it is; the next choice takes over if it was to compute the prompt."""
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        elif sequence.state is not State.ENDED:
            self.line.remove(sequence)
        sequence.state = State.ENDED
        if self._lacking is not None and self._lacking[0] is sequence:
            self._lacking = None
        if self.line.leads(sequence):
            self.line.succeed(sequence)

    def commit(self, row: ScheduledRow) -> None:
        """Count a row of the step in flight as computed. Only if it was finite and its sequence runs.

        Call it before the sampled token is appended: a choice that waits for this prompt is forked here.
        """
        sequence, start, num_tokens, samples = row
        computed = sequence.num_computed_tokens = start + num_tokens
        sequence.num_ahead -= num_tokens
        sequence.num_pending -= samples
        if computed >= (len(sequence.chain) + 1) * self.blocks.block_size:
            self.blocks.enter(sequence)
        # A decode stays one; a prefill becomes one when it samples, or if a single token is left to it.
        if not samples:
            if sequence.num_tokens - computed == 1:
                self.running.turn_to_decode(sequence)
        elif num_tokens > 1:
            self.running.turn_to_decode(sequence)
        if self.line.led and computed >= sequence.num_prompt_tokens and self.line.leads(sequence):
            self._fork(sequence)
        if self.blocks.window is not None:
            self.blocks.window.let_go(sequence)

    def retire(self, step: int) -> None:
        """End a step: nothing writes for it any more."""
        # Sources come free first: each is the tail of what its sequence held, which may be waiting for this step.
        for copies in self._flying.pop(step).copies.values():
            self.blocks.release_sources(copies)
        self.blocks.retire(step)

    def cancel(self, step: int) -> None:
        """Take back a planned step that did not run to its end: the same sequences can be planned again."""
        draft = self._flying.pop(step)
        for sequence, row in draft.rows.items():
            copies = draft.copies.get(sequence, ())
            if sequence.state is State.RUNNING:
                sequence.num_ahead -= row.num_tokens
                sequence.num_pending -= row.samples
                self.blocks.undo_copies(sequence, copies)
            else:
                self.blocks.release_sources(copies)
        self.blocks.retire(step)

    # ------------------------------------------------------------------------------------------------------- planning

    def plan(self) -> Plan:
        """Choose the rows of the next step; none if nothing can run. A plan with rows is in flight from now on."""
        draft = _Draft(self._step + 1, self._budget)
        self._plan_decodes(draft, self._reserve())
        if draft.left:
            self._plan_prefills(draft)
        if draft.left and len(draft.rows) < len(self.running):
            self._plan_decodes(draft, 0)
        rows = draft.rows
        if rows:
            self._step = draft.step
            self._flying[draft.step] = draft
            if len(rows) < len(self.running):
                self.running.take_turns(rows)
            for sequence, row in rows.items():
                sequence.last_step = draft.step
                sequence.num_ahead += row.num_tokens
                sequence.num_pending += row.samples
        copies = self.blocks.pairs([copy for made in draft.copies.values() for copy in made])
        return Plan(draft.step, tuple(rows.values()), *copies)

    def _reserve(self) -> int:
        """Tokens that decodes leave to prefills."""
        if not self.running.prefilling and self._candidate() is None:
            return 0
        share = max(1, self._budget // 4)
        return share if share < self._budget else self._step % 2

    def _plan_decodes(self, draft: _Draft, reserve: int) -> None:
        rows = draft.rows
        draft.left -= reserve
        for sequence in tuple(self.running.decoding):  # a copy: making room may preempt some of them
            if draft.left <= 0:
                break
            start = sequence.num_computed_tokens + sequence.num_ahead
            if sequence in rows or (sequence.num_pending and sequence.ends_in_flight):
                continue
            # One that was preempted a moment ago has no slots.
            lacks = start >= sequence.num_slots or sequence.shares_last
            if lacks and not self._make_room(draft, sequence, start + 1):
                continue
            rows[sequence] = ScheduledRow(sequence, start, 1, True)
            draft.left -= 1
        draft.left += reserve

    def _plan_prefills(self, draft: _Draft) -> None:
        started = tuple(self.running.prefilling)
        if started and draft.step % FAIR_EVERY == 0:
            self._plan_chunk(draft, min(started, key=lambda sequence: sequence.arrival))
        for sequence in started:
            self._admit(draft, above=sequence.priority)
            self._plan_chunk(draft, sequence)
        self._admit(draft)

    def _plan_chunk(self, draft: _Draft, sequence: Sequence) -> None:
        start = sequence.num_planned_tokens
        num_tokens = min(remaining := sequence.num_coming_tokens - start, draft.left)
        if num_tokens <= 0 or sequence in draft.rows or sequence.state is not State.RUNNING or sequence.ends_in_flight:
            return
        if self.blocks.window is not None:
            num_tokens = self.blocks.window.fitting(sequence, num_tokens)
        end = start + num_tokens
        if (end > sequence.num_slots or sequence.shares_last) and not self._make_room(draft, sequence, end):
            return
        draft.rows[sequence] = ScheduledRow(sequence, start, num_tokens, num_tokens == remaining)
        draft.left -= num_tokens

    def _admit(self, draft: _Draft, above: int | None = None) -> None:
        """Let in who heads the line while there is a place, blocks and budget; with `above`, higher priorities only."""
        while draft.left:
            head = self._candidate()
            if head is None or (above is not None and head.priority >= above):
                return
            prefills = (draft.rows[one] for one in self.running.prefilling if one in draft.rows)
            if any(self.blocks.will_share(row, head) for row in prefills):
                return  # its prompt is being computed in this step: the next one finds it in the cache
            lacking = self.blocks.admit(head, self._headroom(head))
            if lacking is not None:
                self._lacking = (head, lacking)
                return
            self._lacking = None
            self.line.admit(head)
            self.running.join(head)
            self._plan_chunk(draft, head)

    def _candidate(self) -> Sequence | None:
        """Return whom to try to admit: None if nobody waits, no place is free, or it failed with as many blocks."""
        head = self.line.head()
        if head is None or len(self.running) >= self._max_num_seqs:
            return None
        if self._lacking is None or self._lacking[0] is not head or not len(self.running):
            return head
        return head if self.blocks.spare(self._lacking[1]) >= 0 or self._step % RETRY_EVERY == 0 else None

    def _headroom(self, sequence: Sequence) -> Need:
        """Return how many blocks its admission must leave free: none if it runs alone."""
        if not len(self.running):
            return Need(0)
        slots, wanted = self.blocks.slots_for(sequence.num_tokens), self.blocks.wanted(self.running)
        return wanted._replace(full=wanted.full + (slots < sequence.max_len - 1))

    # --------------------------------------------------------------------------------------------------------- blocks

    def _make_room(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence blocks for its first `num_tokens` tokens, others' if need be; False if it cannot run now."""
        blocks = self.blocks
        while sequence.state is State.RUNNING:
            if blocks.spare(blocks.missing(sequence, num_tokens)) >= 0:
                copies = blocks.grow(sequence, num_tokens)
                if copies:
                    draft.copies[sequence] = copies
                return True
            if any(pool.num_pending for pool in blocks.pools):
                return False  # blocks come free with the step in flight: wait for it rather than take more away
            if (victim := self.running.newest_of_lowest()).last_step in self._flying:
                return False  # its blocks would come free only with that step, and perhaps others do
            self._preempt(draft, victim)
        return False

    def _preempt(self, draft: _Draft, sequence: Sequence) -> None:
        """Take all blocks of a sequence, and its row if it has one in this plan; it goes back into line."""
        if (row := draft.rows.pop(sequence, None)) is not None:
            draft.left += row.num_tokens
        self.blocks.release_sources(draft.copies.pop(sequence, ()))  # these copies are not in flight
        self._leave(sequence)
        sequence.preempted = True
        self.line.add(sequence)
        self.num_preemptions += 1
        self._lacking = (sequence, Need(0))

    def _leave(self, sequence: Sequence) -> None:
        self.running.leave(sequence)
        self.blocks.release(sequence)

    def _fork(self, leader: Sequence) -> None:
        """Let those who waited for this prompt run on shared blocks where there is room, else put them into line."""
        for sequence in self.line.followers(leader):
            room = len(self.running) < self._max_num_seqs and self.blocks.spare(self.blocks.wanted(self.running)) > 0
            if room and self.blocks.can_fork(leader, sequence) and not self.line.goes_before(sequence):
                self.blocks.fork(leader, sequence)
                self.running.join(sequence)
            else:
                self.line.add(sequence)
