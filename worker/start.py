"""From the decision to begin to a request in the engine: `started`, then refuse or prepare, then hand to the engine."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..clients.entries import encode, to_map
from ..clients.events import ErrorInfo, ModelRef, Started
from ..clients.job import Job
from ..engine.stopping import finish_of, stop_ids_of
from ..engine.types import Request, RequestRefusedError, Tokenizer
from .answer import Answer, AnswerChoice, Times
from .attempt import Begin, refusal
from .context import Context
from .held import Channel, Held, Stage
from .outbox import Outbox
from .prepare import Prepared, PreparePool, PrepareTimeoutError, at_once
from .running import Running
from .text import ReadyRequest, ReplayError, make_ready, sampling_options
from .writer import Writer

if TYPE_CHECKING:
    from ..engine.engine import Engine


class Starter:
    """Begins attempts."""

    def __init__(
        self,
        context: Context,
        outbox: Outbox,
        running: Running,
        engine: Engine,
        tokenizer: Tokenizer,
        pool: PreparePool[Any],
    ) -> None:
        self._context = context
        self._outbox = outbox
        self._running = running
        self._engine = engine
        self._tokenizer = tokenizer
        self._pool = pool
        self._attempt_ms = 0  # of the last attempt

    def start(self, held: Held, begin: Begin) -> None:
        """Write `started`."""
        context, history, job = self._context, held.history, held.job
        # Two entries of one request may be begun in the same millisecond, and both go on after a failover that has lost
        # what told them apart: neither may take the other's entries for its own.
        self._attempt_ms = max(begin.attempt_ms, self._attempt_ms + 1)
        held.begin = begin = replace(begin, attempt_ms=self._attempt_ms)
        held.seed = self._seed(held)
        num_choices = job.n if job is not None else 1
        started = Started(
            id=(begin.attempt_ms, 0),
            attempt=begin.number,
            worker=context.worker,
            job=held.ref,
            resumed=tuple(len(history.choice(index).token_ids) for index in range(num_choices)),
            seed=held.seed,
            fp=held.payload_sha,
            model=ModelRef(context.model.name, context.model.fingerprint),
            metadata=job.metadata if job is not None else None,
        )
        request_id = held.request_id or ""
        field, payload = encode(to_map(started), held.kind)
        writer = Writer(begin.base_id, begin.attempt_ms, field.encode())
        channel = Channel(request_id, context.keys.out(request_id), context.keys.cancel(request_id), writer)
        self._outbox.start(held, channel, payload)

    def _seed(self, held: Held) -> int:
        if held.job is None:
            return 0
        if held.job.seed is not None:
            return held.job.seed
        attempts = held.history.attempts
        return attempts[-1].seed if attempts else secrets.randbits(63)

    def started(self, held: Held) -> None:
        """`started` is in: refuse the request, or prepare it for the engine."""
        begin, job, context = held.begin, held.job, self._context
        if begin is None or held.channel is None:
            raise RuntimeError("a request that has not begun cannot have started")
        context.counters.attempts += 1
        settled = held.history.num_settled
        context.log.info("started", request=held.request_id, attempt=begin.number, settled=settled, **held.trace)
        held.answer = self._answer(held)
        timeout_ms = job.timeout_ms if job is not None else None
        if timeout_ms is not None:
            held.deadline_ms = held.entry_ms + timeout_ms
        refused = refusal(
            begin,
            held.failure,
            cancelled=held.channel.writer.cancelled,
            entry_ms=held.entry_ms,
            timeout_ms=timeout_ms,
            now_ms=context.clock.now_ms(),
            rules=context.rules,
        )
        if refused is not None:
            error = ErrorInfo(refused.code, refused.message, refused.param) if refused.reason == "error" else None
            context.counters.refused += 1
            self._running.end(held, refused.reason, error)
            held.dead = error if refused.dead else None
        elif job is not None:
            self._prepare(held, job)

    def _answer(self, held: Held) -> Answer:
        job, history = held.job, held.history
        choices = [
            AnswerChoice(
                num_tokens=len(history.choice(index).token_ids), ended=history.choice(index).finished is not None
            )
            for index in range(job.n if job is not None else 1)
        ]
        return Answer(
            kind=held.kind,
            stream=job.stream if job is not None else True,
            with_logprobs=job is not None and job.logprobs is not None,
            choices=choices,
            times=Times(held.entry_ms),
            holds_back=self._context.settings.flush_interval_s > 0 and (job is None or job.stream),
            prompt_logprobs_due=job is not None and job.prompt_logprobs is not None and not history.has_prompt_logprobs,
        )

    def _prepare(self, held: Held, job: Job) -> None:
        held.stage = Stage.PREPARE
        if job.response_format is not None:
            self._refuse(held, RequestRefusedError("unsupported", "not built yet", "response_format"))
            return
        work = partial(make_ready, job, held.history, self._tokenizer)
        if job.prompt_token_ids is not None and not held.history.num_settled:
            self.prepared(held, at_once(held, work))  # nothing to tokenise or to decode: a thread would cost more
        else:
            self._pool.submit(held, work)

    def prepared(self, held: Held, result: Prepared[Any]) -> None:
        """Take what the pool has made of a request: give it to the engine, or refuse it."""
        if isinstance(result.value, ReadyRequest):
            self._submit(held, result.value)
        else:
            self._refuse(held, _as_refusal(result.error))

    def _submit(self, held: Held, ready: ReadyRequest) -> None:
        job, answer = held.job, held.answer
        if job is None or answer is None:
            raise RuntimeError("only what was decoded is prepared")
        answer.num_prompt_tokens = len(ready.prompt_token_ids)
        for choice, each in zip(answer.choices, ready.choices, strict=True):
            choice.text = each.text
        if self._end_settled(held, ready):
            return
        request = Request(
            request_id=held.engine_id,
            prompt_token_ids=ready.prompt_token_ids,
            options=sampling_options(job, held.seed),
            settled=tuple(held.history.choice(index).token_ids for index in range(job.n)),
            skip_choices=frozenset(index for index, choice in enumerate(answer.choices) if choice.ended),
            priority=_priority(held.ref.key),
            cache_salt=job.cache_salt,
        )
        try:
            self._engine.add(request)
        except RequestRefusedError as error:
            self._refuse(held, error)
            return
        except ValueError as error:
            # not what this worker builds; one such request must not end the worker, and then the next one, and so on
            self._context.log.error("the engine does not take it", request=held.request_id, error=str(error))
            self._refuse(held, RequestRefusedError("internal", "the engine does not take the request"))
            return
        self._running.add(held)

    def _end_settled(self, held: Held, ready: ReadyRequest) -> bool:
        """Write `finished` for choices that their settled tokens have ended. True if nothing is left to run."""
        job, answer, engine = held.job, held.answer, self._engine
        if job is None or answer is None or not held.history.num_settled:
            return False
        options = sampling_options(job, held.seed)
        stop_ids = stop_ids_of(options, engine.runner.eos_token_ids)
        for index, each in enumerate(ready.choices):
            settled = held.history.choice(index).token_ids
            finish = each.ended_by or finish_of(
                settled, options, stop_ids, engine.max_model_len, len(ready.prompt_token_ids)
            )
            if finish is not None and not answer.choices[index].ended:
                self._running.close(held, index, finish)
        if answer.num_open == 0 and held.stage is Stage.PREPARE:
            self._running.end(held, "stop")  # every choice had its `finished`, and none was terminal
        return held.stage is not Stage.PREPARE

    def _refuse(self, held: Held, error: RequestRefusedError) -> None:
        self._context.counters.refused += 1
        self._running.end(held, "error", ErrorInfo(error.code, error.message, error.param))


def _priority(stream: str) -> int:
    if stream.endswith(":jobs:high"):
        return -1
    return 1 if stream.endswith(":jobs:low") else 0


def _as_refusal(error: Exception | None) -> RequestRefusedError:
    """How a failure of preparing is told. Messages of unknown errors may hold the prompt and stay out."""
    if isinstance(error, RequestRefusedError):
        return error
    if isinstance(error, PrepareTimeoutError):
        return RequestRefusedError("internal", "rendering and tokenising took too long")
    if isinstance(error, ReplayError):
        return RequestRefusedError("internal", str(error))
    return RequestRefusedError("internal", f"the tokenizer failed with {type(error).__name__}")
