"""The model of the chaos suite: what it answers is a pure function of prompt, seed, choice and everything said so far.

It speaks in phrases of bytes, one token a byte: plain words, characters of several bytes, emoji of several characters,
halves of characters, the beginnings of stop strings and whole ones, newlines, special tokens, the end. Which phrase
comes next depends on the whole context, so a worker that goes on from anything but the true context says something
else. `tests/support/chaos_oracle.py` works out from the same function what a request gives when nobody disturbs it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field

from headrace.engine.sequence import Sequence
from headrace.engine.types import Plan, RowResult
from tests.support.scripted import EOS, IM_START, ScriptedRunner

STOP_STRINGS = ("three four", "END", "世界👩", "\n\n")
POISON = 7  # a prompt that holds this byte kills whoever computes it
_PHRASES: tuple[str, ...] = (
    *(" one", " two", " three", " three fou", " three four", " five", "né", "世界", "世", "👩‍👩‍👧", "👩", "🇰🇷"),
    *("EN", "END", "\n", "\n\n", ".", ", and"),
)
# A half of an emoji without its end, a byte that begins nothing, a special token between words.
BOOK: tuple[tuple[int, ...], ...] = (
    *(tuple(phrase.encode()) for phrase in _PHRASES),
    *((0xF0, 0x9F), (0xFF,), (IM_START, 0x20), (EOS,)),
)


def wanted_token(prompt: TokenIds[int], output: TokenIds[int], noise: TokenIds[int]) -> int:
    """What the model says next; `noise` is (seed, choice) above temperature 0, else nothing."""
    start, said = 0, tuple(output)
    beginning = (*noise, *prompt)
    while True:
        phrase = BOOK[(hash((beginning, said[:start])) & (2**61 - 1)) % len(BOOK)]
        if start + len(phrase) > len(said):
            return phrase[len(said) - start]
        start += len(phrase)


def noise_of(temperature: float, seed: int, choice: int) -> tuple[int, ...]:
    """What the answer depends on besides the context."""
    return (seed, choice) if temperature > 0 else ()


def _script(sequence: Sequence) -> int:
    options, split = sequence.options, sequence.num_prompt_tokens
    noise = noise_of(options.temperature, options.seed, sequence.choice)
    return wanted_token(sequence.token_ids[:split], sequence.token_ids[split:], noise)


@dataclass(frozen=True, slots=True)
class Fate:
    """In the step that would compute output token `position` of a request, the process sends itself a signal."""

    request_id: str
    position: int
    number: signal.Signals
    choice: int = 0

    def meets(self, sequence: Sequence) -> bool:
        """Whether the time has come."""
        name = sequence.request_id.rpartition("#")[0]
        return (name, sequence.choice, sequence.num_output_tokens) == (self.request_id, self.choice, self.position)


@dataclass
class ChaosRunner(ScriptedRunner):
    """The scripted runner with this model; `fates` and poison end or stop the process in the middle of a step."""

    fates: list[Fate] = field(default_factory=list[Fate])

    def __post_init__(self) -> None:
        self.script = _script
        super().__post_init__()

    def run(self, plan: Plan) -> list[RowResult]:
        """Compute a step, unless it is the last."""
        for row in plan.rows:
            sequence = row.sequence
            if POISON in sequence.token_ids[: sequence.num_prompt_tokens]:
                os.kill(os.getpid(), signal.SIGKILL)
            for fate in [each for each in self.fates if row.samples and each.meets(sequence)]:
                self.fates.remove(fate)  # one that was only stopped goes on, and must not stop again
                os.kill(os.getpid(), fate.number)
        return super().run(plan)
