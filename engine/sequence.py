"""One choice of one request while the engine works on it: the only mutable state that scheduler and runner share.

    token_ids   [ prompt ............ | settled .... | sampled here ...... ]
                0          num_prompt_tokens                    num_tokens
    key/values  [ computed ................................. | to compute  ]
                0                        num_computed_tokens      num_tokens
    planned     [ computed | in flight: num_ahead | to plan ]   of num_tokens and of the num_pending sampled in flight

There are no phases: `num_computed_tokens` catches up with `num_tokens`, and whoever reaches the end samples one token.
A prompt, a chunk of one, a cached prefix, resuming after a preemption and resuming another worker's attempt are this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .prefix_cache import CachedBlock
    from .types import SamplingOptions, TokenLogprobs


class State(Enum):
    """Where a sequence is. Only running ones hold blocks."""

    DEPENDENT = auto()  # waits until another choice has computed the prompt they share
    WAITING = auto()  # in line for a place and for blocks
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable, compared and hashed by identity.

    The scheduler and the engine change it, between two steps and while they plan or commit one; the runner only reads
    it, from the moment a plan names it until `Runner.run` returns. `token_ids` only grows. While `epoch` stays the
    same, `block_ids` and `window_ids` only grow too, but for entries that become holes, which nothing reads any more; a
    new `epoch` means that entries may have changed, so read the lists anew.
    """

    request_id: str
    choice: int
    options: SamplingOptions
    salt: str
    priority: int  # smaller runs first
    arrival: int  # unique in the engine, in order of arrival; the choices of a request have consecutive ones
    token_ids: list[int]  # prompt + settled + sampled
    num_prompt_tokens: int
    num_settled: int  # output tokens that an earlier attempt has published
    stop_ids: frozenset[int]  # EOS (unless ignored) and stop tokens; the sampler bans them below min_tokens
    max_len: int  # num_tokens at which the choice ends with "length"
    min_stop_len: int  # num_tokens before a stop token from which on that token ends the choice

    only_best: bool  # `options.only_best`, which is asked for at every token

    num_computed_tokens: int = 0  # changes when a step is committed
    block_ids: list[int] = field(
        default_factory=list[int]
    )  # block i holds tokens [i * block_size, (i + 1) * block_size)
    window_ids: list[int] = field(default_factory=list[int])  # likewise, in the layers with a window
    num_slots: int = 0  # tokens that both have room for
    serial: int = field(default_factory=count().__next__)  # unique in the process, for whoever remembers block_ids
    epoch: int = 0  # counts the times that entries of block_ids or window_ids were replaced
    shares_last: bool = False  # the block of the next token is a sibling's too and must be copied before it is written

    state: State = State.WAITING
    preempted: bool = False  # waits for its return after losing its blocks
    last_step: int = 0  # the last step that computed for it: until that is committed its blocks may still be written
    num_ahead: int = 0  # tokens that steps in flight compute
    num_pending: int = 0  # tokens that steps in flight sample
    chain: list[CachedBlock] = field(default_factory=list["CachedBlock"])  # cache entries of the leading block_ids
    num_cached_tokens: int = -1  # prompt tokens served by the prefix cache at the first admission, -1 before it
    # Log-probabilities of prompt positions 0, 1, … so far (the first is None); None once delivered or if not asked for.
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output, settled tokens included."""
        return len(self.token_ids)

    @property
    def num_planned_tokens(self) -> int:
        """Computed, or by a step in flight."""
        return self.num_computed_tokens + self.num_ahead

    @property
    def num_coming_tokens(self) -> int:
        """Known, or sampled by a step in flight."""
        return len(self.token_ids) + self.num_pending

    @property
    def ends_in_flight(self) -> bool:
        """Whether the token that a step in flight samples is the last one for sure."""
        return self.num_pending > 0 and self.num_coming_tokens >= self.max_len

    @property
    def num_output_tokens(self) -> int:
        """Settled and sampled tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt positions still lack log-probabilities: such a sequence must compute its whole prompt."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens
