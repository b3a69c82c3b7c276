"""Hand-off types of the engine: what callers give it, what it gives back, what scheduler and runner exchange.

No torch here, and nothing mutable: whoever holds one of these may keep it. What is made for every token is a named
tuple, the rest are frozen dataclasses: with nine fields a tuple takes 0.27 µs to make, a frozen dataclass 0.97 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from .sequence import Sequence

FinishReason = Literal["stop", "length", "error"]
# One token's alternatives: (token id, natural log of its probability), the chosen token first, then the k best.
TokenLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What a request may ask of its output. Callers check ranges, the engine checks ids against the vocabulary."""

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # sees prompt and output
    presence_penalty: float = 0.0  # these two see the output only
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int = 0  # noise is a function of (seed, choice, position) alone
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    n: int = 1
    logprobs: int | None = None  # None is off; k gives the chosen token and the k best
    prompt_logprobs: int | None = None

    @property
    def changes_scores(self) -> bool:
        """Whether the model's scores are changed before a token is drawn, `min_tokens` apart."""
        penalised = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalised or bool(self.logit_bias)

    @property
    def only_best(self) -> bool:
        """Whether all that is asked of the scores is which one is the best, `min_tokens` apart."""
        return self.temperature == 0.0 and self.logprobs is None and not self.changes_scores


@dataclass(frozen=True, slots=True)
class Request:
    """One job as the engine takes it. `settled` holds, per choice, what an earlier attempt has already published."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    options: SamplingOptions = field(default_factory=SamplingOptions)
    settled: tuple[tuple[int, ...], ...] = ()  # empty, or one entry per choice
    skip_choices: frozenset[int] = frozenset()  # choices that have ended in an earlier attempt
    priority: int = 0  # smaller runs first: -1 high, 0 normal, 1 low
    cache_salt: str = ""  # cached prefixes are shared within a salt only


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How large the engine is. None means: work it out from the model and the machine."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None  # the model's own
    block_size: int = 16
    num_kv_blocks: int | None = None  # from memory
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended, as far as the engine knows."""

    reason: FinishReason
    stop: int | str | None = None  # the EOS or stop token id; a stop string
    error: str | None = None  # an error code of the protocol (`numeric`, `internal`)
    message: str = ""


class ChoiceOutput(NamedTuple):
    """What one step added to one choice of a request."""

    request_id: str
    choice: int
    # Index of token_ids[0] in the choice's output, settled tokens counted. Hides tuple.index, which nobody needs here.
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    token_ids: tuple[int, ...]  # every sampled id, EOS and stop tokens included; empty with an error
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once, on choice 0; the first element is None
    finish: Finish | None = None
    cached_tokens: int = 0  # prompt tokens that the prefix cache served when this choice was first admitted
    first_scheduled_s: float = 0.0  # time.monotonic() of the step that first computed for this request


class ScheduledRow(NamedTuple):
    """One sequence's share of a step: tokens [start, start + num_tokens) of `sequence.token_ids` are computed."""

    sequence: Sequence  # read-only for the runner, valid until the step is committed
    start: int
    num_tokens: int
    samples: bool  # the row reaches the sequence's last token, so one token is sampled from its last position


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: rows to compute, and block copies (source, destination) to make before anything is written."""

    step: int
    rows: tuple[ScheduledRow, ...]
    copies: tuple[tuple[int, int], ...] = ()
    window_copies: tuple[tuple[int, int], ...] = ()  # in the layers with a window

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, over all rows."""
        return sum(row.num_tokens for row in self.rows)


class RowResult(NamedTuple):
    """What the runner gives back for one row of the plan, in the plan's order."""

    token_id: int | None = None  # None where the row does not sample, or is not finite
    finite: bool = True  # False: a NaN or an infinity in the row's hidden states or logits
    logprobs: TokenLogprobs | None = None
    # for prompt positions start+1 … min(start+num_tokens, num_prompt_tokens-1), if the request asked
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Runner(Protocol):
    """The model side of the engine: the only part that knows of tensors. A scripted one drives tests without torch."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    num_blocks: int  # of the layers that see all; 0: there are none
    block_size: int
    window: int  # positions that a query sees at most in the layers with a window, its own included; 0: none has one
    num_window_blocks: int  # of these layers

    def run(self, plan: Plan) -> list[RowResult]:
        """Compute one step. Must not keep or change anything of the plan's sequences."""
        ...


@runtime_checkable
class Launcher(Protocol):
    """A runner that computes while its caller does something else."""

    def launch(self, plan: Plan) -> Callable[[], list[RowResult]]:
        """Begin one step; what is given back waits for its end, and must be called before the next one begins.

        Meanwhile the plan's sequences may end, and their blocks may be given back, but not to others.
        """
        ...


class Flight(Protocol):
    """A step in flight."""

    def draw(self) -> None:
        """Begin to sample: every token before is known now. Of sequences that have ended nothing is wanted."""
        ...

    def finish(self) -> list[RowResult]:
        """Wait for what the step gives, in the plan's order; called once, after `draw`."""
        ...


@runtime_checkable
class Overlapper(Protocol):
    """A runner that begins a step before the tokens of the step before are known.

    A row may reach one token further than its sequence's token_ids: the one that the step before samples for it.
    """

    depth: int  # most steps in flight, 2; 1: as a `Launcher`

    def begin(self, plan: Plan) -> Flight:
        """Begin a step; the one before has begun to sample, and may be in flight.

        What the plan's sequences hold is read here, and not later: while the step is in flight they may end, and their
        blocks come free when it has landed. Steps are computed in the order in which they are begun,
        also one that nobody finishes, because the engine gave it up: what is begun later overwrites what that wrote.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave: outputs to publish, and what ran, for those who watch."""

    step: int
    outputs: tuple[ChoiceOutput, ...]
    rows: tuple[ScheduledRow, ...]  # what ran; of its sequences only what never changes may be read

    @property
    def scheduled(self) -> tuple[tuple[str, int, int], ...]:
        """(request id, choice, tokens computed) per row."""
        return tuple((row.sequence.request_id, row.sequence.choice, row.num_tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for status, health and metrics."""

    step: int
    running: int  # sequences that hold blocks
    waiting: int  # sequences that hold none
    free_blocks: int  # of the layers that see all, or else of the others; cached ones that nobody holds count as free
    total_blocks: int
    cached_blocks: int
    prefix_queries: int  # prompt tokens looked up so far
    prefix_hits: int  # of these, served from the cache
    preemptions: int


class RequestRefusedError(ValueError):
    """A request that can never run here: `code` as the protocol names it, `param` the field at fault, if one is."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class Detokenizer(Protocol):
    """Turns one choice's ids into final text, whole characters only. Never raises on any id sequence."""

    def push(self, token_ids: tuple[int, ...]) -> str:
        """Take further ids; give the text that is now final (special tokens skipped)."""
        ...

    def flush(self) -> str:
        """The end: give what was held back, half characters as U+FFFD."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back, as the model's own files say."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the model expects, such as BOS."""
        ...

    def encode_chat(
        self,
        messages: list[dict[str, object]],
        tools: list[object] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Ids of a chat by the model's own template; special-token text inside contents stays plain text."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one choice."""
        ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Which model this is: `fingerprint` is SHA-256 over config, tokenizer, weights index and dtype, in hex."""

    name: str
    fingerprint: str
