"""From a decoded job to what the engine and the answer need: prompt ids, and the texts of its choices, replayed.

Runs on the threads of `prepare`: nothing here touches the engine or a connection.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..clients.job import Job
from ..engine.choice_text import ChoiceText
from ..engine.stop_strings import StopMatcher
from ..engine.types import Finish, RequestRefusedError, SamplingOptions, Tokenizer
from .history import History, PastChoice


@dataclass(frozen=True, slots=True)
class ReadyChoice:
    """One choice as it goes on: `text` stands behind all settled tokens."""

    text: ChoiceText
    ended_by: Finish | None = None  # the settled text already holds this stop string


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """A request that can be given to the engine."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[ReadyChoice, ...]


class ReplayError(Exception):
    """What was published is not what the settled ids decode to here: going on would break the text."""


def make_ready(job: Job, history: History, tokenizer: Tokenizer) -> ReadyRequest:
    """Render and tokenise the prompt, replay what is settled.

    Raises RequestRefusedError for a prompt that cannot be rendered, ReplayError, and whatever the tokenizer raises.
    """
    return ReadyRequest(prompt_ids(job, tokenizer), ready_choices(job, history, tokenizer))


def prompt_ids(job: Job, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of the job's prompt, whichever of the three it is."""
    if job.prompt_token_ids is not None:
        return job.prompt_token_ids
    if job.prompt is not None:
        return tuple(tokenizer.encode(job.prompt))
    messages = [dict(message) for message in job.messages or ()]
    tools = None if job.tools is None else [dict(tool) for tool in job.tools]
    return tuple(tokenizer.encode_chat(messages, list(tools) if tools is not None else None, job.chat_template_kwargs))


def ready_choices(job: Job, history: History, tokenizer: Tokenizer) -> tuple[ReadyChoice, ...]:
    """The texts of all choices behind their settled tokens. Raises ReplayError, and RequestRefusedError for `stop`."""
    try:
        matcher = StopMatcher(job.stop, job.include_stop)
    except ValueError as error:
        raise RequestRefusedError("invalid_request", str(error), "stop") from error
    return tuple(_replayed(job, history.choice(index), matcher.fresh(), tokenizer) for index in range(job.n))


def _replayed(job: Job, past: PastChoice, matcher: StopMatcher, tokenizer: Tokenizer) -> ReadyChoice:
    text = ChoiceText(tokenizer.detokenizer(), matcher, job.min_tokens)
    if not past.token_ids:
        return ReadyChoice(text)
    replayed = text.replay(past.token_ids)
    if past.finished is None and replayed.text != past.text:
        raise ReplayError("the settled tokens do not decode to the text that was published")
    ended_by = None if replayed.stop is None else Finish("stop", stop=replayed.stop)
    return ReadyChoice(text, ended_by)


def sampling_options(job: Job, seed: int) -> SamplingOptions:
    """The job's options as the engine takes them."""
    return SamplingOptions(
        max_tokens=job.max_tokens,
        min_tokens=job.min_tokens,
        temperature=job.temperature,
        top_p=job.top_p,
        top_k=job.top_k,
        min_p=job.min_p,
        repetition_penalty=job.repetition_penalty,
        presence_penalty=job.presence_penalty,
        frequency_penalty=job.frequency_penalty,
        logit_bias=job.logit_bias,
        seed=seed,
        stop=job.stop,
        stop_token_ids=job.stop_token_ids,
        ignore_eos=job.ignore_eos,
        include_stop=job.include_stop,
        n=job.n,
        logprobs=job.logprobs,
        prompt_logprobs=job.prompt_logprobs,
    )
