"""The engine without a queue: a list of prompts in, a list of completions out.

    from headrace.engine import LLM, SamplingOptions

    llm = LLM("path/to/model")
    options = SamplingOptions(max_tokens=32, temperature=0)
    for completion in llm.generate(["The water runs", "Das Rad dreht sich"], options):
        print(completion.text)

Prompts are text or token ids, and as many of them run at once as the engine has places and blocks for.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .choice_text import ChoiceText
from .stop_strings import StopMatcher
from .threads import sleep_when_idle
from .types import ChoiceOutput, EngineConfig, Finish, Request, SamplingOptions, TokenLogprobs

sleep_when_idle()  # the next import brings in torch, after which it is too late
from .load import load_engine  # noqa: E402

__all__ = ["LLM", "Completion", "load_engine"]


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice of one prompt."""

    prompt: int  # index in the list that was given
    choice: int
    text: str
    token_ids: tuple[int, ...]  # every sampled id, EOS and stop tokens included
    finish: Finish
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # on choice 0, if asked for


@dataclass(slots=True)
class _Open:
    """A choice that is not over."""

    text: ChoiceText
    pieces: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class LLM:
    """A model and its engine, for programs that have all their prompts at hand. Not for several threads at once."""

    def __init__(self, model: str | Path, config: EngineConfig | None = None, *, revision: str | None = None) -> None:
        """Load a model; see `load.load_engine` for the arguments and what it raises."""
        self.engine, self.tokenizer, self.info = load_engine(model, config, revision=revision)
        self._calls = 0

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: SamplingOptions | Sequence[SamplingOptions] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete every prompt, text or token ids; give the choices in the order of the prompts.

        options   one for all prompts, or one each. None samples at temperature 1, each prompt with a seed of its own;
                  options that are given keep their seed, so equal prompts with equal options give equal texts
        progress  show a bar on the terminal

        Raises:
            RequestRefusedError: a prompt can never run here. Nothing has run then.
            ValueError: the number of options is not that of the prompts.
        """
        wanted = _options_of(options, len(prompts))
        self._calls += 1
        open_choices: dict[tuple[str, int], _Open] = {}
        requests = [self._request(number, *pair) for number, pair in enumerate(zip(prompts, wanted, strict=True))]
        done: list[Completion] = []
        try:
            for request in requests:
                self.engine.add(request)
                for choice in range(request.options.n):
                    open_choices[request.request_id, choice] = self._open(request.options)
            with _bar(progress, len(open_choices)) as advance:
                while open_choices:
                    for output in self.engine.step().outputs:
                        if (completion := self._take(open_choices, output)) is not None:
                            done.append(completion)
                            advance()
        finally:
            for request in requests:  # does nothing for those that ended
                self.engine.abort(request.request_id)
        return sorted(done, key=lambda one: (one.prompt, one.choice))

    def _request(self, number: int, prompt: str | Sequence[int], options: SamplingOptions) -> Request:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return Request(f"{self._calls}-{number}", tuple(token_ids), options)

    def _open(self, options: SamplingOptions) -> _Open:
        matcher = StopMatcher(options.stop, options.include_stop)
        return _Open(ChoiceText(self.tokenizer.detokenizer(), matcher, options.min_tokens))

    def _take(self, open_choices: dict[tuple[str, int], _Open], output: ChoiceOutput) -> Completion | None:
        """Add a step's output to its choice; give the completion if that ended it."""
        key = (output.request_id, output.choice)
        state = open_choices[key]
        chunk = state.text.feed(output.token_ids)
        state.pieces.append(chunk.text)
        state.token_ids += output.token_ids
        state.logprobs += output.logprobs
        state.prompt_logprobs = output.prompt_logprobs or state.prompt_logprobs
        finish = output.finish
        if chunk.stop is not None:
            finish = Finish("stop", stop=chunk.stop)
            self.engine.finish(*key)
        if finish is None:
            return None
        state.pieces.append(state.text.end())
        del open_choices[key]
        return Completion(
            prompt=int(output.request_id.rpartition("-")[2]),
            choice=output.choice,
            text="".join(state.pieces),
            token_ids=tuple(state.token_ids),
            finish=finish,
            logprobs=tuple(state.logprobs),
            prompt_logprobs=state.prompt_logprobs,
        )


def _options_of(options: SamplingOptions | Sequence[SamplingOptions] | None, count: int) -> list[SamplingOptions]:
    if options is None:
        return [SamplingOptions(seed=secrets.randbits(63)) for _ in range(count)]
    if isinstance(options, SamplingOptions):
        return [options] * count
    if len(options) != count:
        raise ValueError(f"{count} prompts need as many options, not {len(options)}")
    return list(options)


@contextmanager
def _bar(shown: bool, total: int) -> Generator[Callable[[], None]]:
    """A progress bar that advances by one a call."""
    if not shown:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("completions", total=total)
        yield lambda: bar.advance(task)
