"""Requests that have begun: what the engine gives goes into their streams; cancelling, time limits, handing over.

With a flush interval, tokens behind a choice's first are held back until the interval since the request's last entry
of tokens is over. What is held back is in no chain yet and counts nowhere as published: if the worker dies, the next
attempt computes it again. Whatever ends or hands over a request takes it along.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ..clients.entries import encode, to_map
from ..clients.events import ErrorInfo, Reason, Released
from ..engine.types import ChoiceOutput, Finish, RequestRefusedError, StepOutput, Tokenizer
from .answer import Answer
from .batch import Batch
from .connection import Failed
from .context import Context
from .held import Channel, Held, Stage
from .outbox import Outbox
from .text import ReplayError, ready_choices

if TYPE_CHECKING:
    from ..engine.engine import Engine

_NO_ANSWER = "a request without an answer cannot be running"


class Running:
    """The requests that the engine has, and the ends of all requests."""

    def __init__(self, context: Context, outbox: Outbox, engine: Engine, tokenizer: Tokenizer) -> None:
        self._context = context
        self._outbox = outbox
        self._engine = engine
        self._tokenizer = tokenizer
        self._by_engine_id: dict[str, Held] = {}  # all in stage RUN
        self._flush_interval_s = context.settings.flush_interval_s
        self._holding: dict[Held, None] = {}  # those of which something is held back

    def add(self, held: Held) -> None:
        """The engine has it from now on."""
        held.stage = Stage.RUN
        self._by_engine_id[held.engine_id] = held

    def publish(self, step: StepOutput) -> None:
        """Turn what a step gave into entries."""
        now_s = time.monotonic()
        now_ms = self._context.clock.at_ms(now_s)
        find, num_new = self._by_engine_id.get, 0
        for output in step.outputs:
            held = find(output.request_id)
            if held is not None:
                num_new += self._publish(held, output, now_s, now_ms)
        self._context.counters.tokens += num_new

    def _publish(self, held: Held, output: ChoiceOutput, now_s: float, now_ms: float) -> int:
        """Returns how many tokens are on their way into the stream."""
        answer = held.answer
        if answer is None:
            raise RuntimeError(_NO_ANSWER)
        if answer.times.scheduled_at_ms is None:
            answer.times.scheduled_at_ms = self._context.clock.at_ms(output.first_scheduled_s)
        payload, num_new, finish, stop_found = answer.feed(output, now_ms)
        if stop_found:
            self._engine.finish(output.request_id, output.choice)
        if payload is None:
            if answer.holds_back:
                self._holding[held] = None
            return 0
        terminal = answer.num_open == 0
        self._outbox.append(held, payload, num_new, terminal)
        if terminal:
            del self._by_engine_id[held.engine_id]
            self._holding.pop(held, None)
            reason = finish and finish.reason
            self._context.log.info("finished", request=held.request_id, reason=reason, **held.trace)
        elif finish is None:
            held.flush_at_s = now_s + self._flush_interval_s
        return num_new

    def _flush(self, held: Held) -> None:
        """Write what is held back of a request."""
        for payload, num_new in _answer(held).take_held():
            self._context.counters.tokens += num_new
            self._outbox.append(held, payload, num_new)

    def _flush_due(self) -> None:
        """Write what has been held back for long enough."""
        now_s = time.monotonic()
        for held in [each for each in self._holding if each.flush_at_s <= now_s]:
            self._flush(held)
            held.flush_at_s = now_s + self._flush_interval_s
            del self._holding[held]

    def end(self, held: Held, reason: Reason, error: ErrorInfo | None = None) -> None:
        """End a begun request with everything that is open of it."""
        self.stop(held)
        self._replay_held_back(held)
        now_ms = self._context.clock.at_ms(time.monotonic())
        payloads = _answer(held).close_all(reason, now_ms, error)
        for payload in payloads[:-1]:
            self._outbox.append(held, payload)
        self._outbox.append(held, payloads[-1], 0, True)
        code, param = (error.code, error.param) if error is not None else (None, None)
        self._context.log.info("ended", request=held.request_id, reason=reason, code=code, param=param, **held.trace)

    def _replay_held_back(self, held: Held) -> None:
        """Text that earlier attempts held back comes out at the end, also if this attempt has run nothing yet."""
        job, answer, history = held.job, held.answer, held.history
        if job is None or answer is None or not history.num_settled or answer.choices[0].text is not None:
            return
        fingerprint = self._context.model.fingerprint
        if any(each.fingerprint != fingerprint for each in history.attempts if each.num_settled):
            return
        try:
            ready = ready_choices(job, history, self._tokenizer)
        except (ReplayError, RequestRefusedError):
            return
        for choice, each in zip(answer.choices, ready, strict=True):
            choice.text = each.text

    def close(self, held: Held, choice: int, finish: Finish) -> None:
        """End one choice that its settled tokens have ended."""
        now_ms = self._context.clock.at_ms(time.monotonic())
        answer = _answer(held)
        payload = answer.close(choice, finish.reason, now_ms, finish.stop)
        self._outbox.append(held, payload, 0, answer.num_open == 0)

    def release(self, held: Held) -> None:
        """Hand a begun request over: `released`, and behind it the entry itself."""
        self.stop(held)
        self._flush(held)  # or the next attempt would have to compute it again
        payload = encode(to_map(Released((0, 0))), held.kind)[1]
        self._outbox.append(held, payload)
        self._outbox.end(held)
        held.released = True

    def drop(self, held: Held) -> None:
        """Forget a request at once; nothing of it is written any more."""
        self.stop(held)
        self._context.memory.drop(held)

    def stop(self, held: Held) -> None:
        """Take a request away from the engine, if it has it."""
        self._holding.pop(held, None)
        # Of two entries of one request begun in the same millisecond, one is a duplicate: it must not take the other's.
        if self._by_engine_id.get(held.engine_id) is held:
            del self._by_engine_id[held.engine_id]
            self._engine.abort(held.engine_id)

    # --- cancelling and time limits -----------------------------------------------------------------------------------

    def collect(self, batch: Batch) -> None:
        """Ask about the cancel flags of those that have learnt nothing for a while: in prefill, or silent."""
        asked_before_s = time.monotonic() - self._context.settings.cancel_poll_s
        for held in self._begun():
            channel = held.channel
            if channel is not None and channel.flag_seen_s <= asked_before_s:
                batch.add((b"EXISTS", channel.cancel), partial(self._flag, channel))

    def _flag(self, channel: Channel, outcome: Any) -> None:
        if not isinstance(outcome, Failed):
            channel.flag_seen_s = time.monotonic()
            channel.writer.cancelled = channel.writer.cancelled or outcome == 1

    def _begun(self) -> list[Held]:
        """The requests in stages PREPARE and RUN."""
        return [*self._context.memory.at(Stage.PREPARE), *self._by_engine_id.values()]

    def watch(self) -> None:
        """Write what is due of what is held back; end what is cancelled or out of time."""
        if self._holding:
            self._flush_due()
        now_ms = self._context.clock.now_ms()
        for held in self._begun():
            if held.channel is not None and held.channel.writer.cancelled:
                self._context.counters.cancelled += 1
                self.end(held, "cancelled")
            elif held.deadline_ms is not None and now_ms >= held.deadline_ms:
                self._context.counters.deadlines += 1
                self.end(held, "deadline")


def _answer(held: Held) -> Answer:
    if held.answer is None:
        raise RuntimeError(_NO_ANSWER)
    return held.answer
