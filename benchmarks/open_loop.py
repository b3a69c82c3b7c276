"""Requests that come at random instants, whatever the answers do, put into a queue by two kinds of client.

bare      XADD without waiting, and for each request a connection that waits for its stream already: the queue's cost
library   `AsyncClient`, a task a request that submits and then follows: what a service written in Python sees

Both give, for each request in order, the milliseconds from its call to its first token, and how late the call came.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import hiredis

from headrace.clients import AsyncClient, Finished, Tokens
from headrace.clients.keys import Keys
from headrace.clients.submission import build
from headrace.worker.embedded import HOST

from .crowd import Crowd
from .processes import RunError
from .rig import job_options
from .workloads import Work, uniform

_HIREDIS: Any = hiredis  # its stub takes one word for a command
Times = tuple[list[float], list[float]]  # ms to the first token, ms late


class Arrival(NamedTuple):
    """One request and its instant."""

    at_s: float
    work: Work


def poisson(rate: float, seconds: float, num_in: int, num_out: int, seed: int = 5) -> list[Arrival]:
    """Arrivals in [0, seconds), on average `rate` a second; the same for the same arguments."""
    rnd, at_s, instants = random.Random(seed), 0.0, list[float]()
    while (at_s := at_s + rnd.expovariate(rate)) < seconds:
        instants.append(at_s)
    return [Arrival(*each) for each in zip(instants, uniform(len(instants), num_in, num_out), strict=True)]


def bare_client(port: int, keys: Keys, due: Sequence[Arrival]) -> Times:
    """One thread that sends and reads. Raises RunError or a StreamError if an answer is not what was asked."""
    ids = [f"first-{number}" for number in range(len(due))]
    commands = [_xadd(keys, *each) for each in zip(ids, due, strict=True)]
    first_ms, late_ms, called_s = [0.0] * len(due), [0.0] * len(due), [0.0] * len(due)
    with Crowd(port, keys, ids) as crowd, socket.create_connection((HOST, port)) as sender:
        crowd.selector.register(sender, selectors.EVENT_READ, None)
        begun_s, sent = time.perf_counter(), 0
        while crowd.open:
            wait_s = None if sent == len(due) else max(0.0, due[sent].at_s - (time.perf_counter() - begun_s))
            for one in crowd.take(wait_s):
                number = one.number
                if one.num_tokens and not first_ms[number]:
                    first_ms[number] = (time.perf_counter() - called_s[number]) * 1e3
            now_s = time.perf_counter()
            while sent < len(due) and due[sent].at_s <= now_s - begun_s:
                called_s[sent] = now_s
                late_ms[sent] = (now_s - begun_s - due[sent].at_s) * 1e3
                sender.sendall(commands[sent])
                sent += 1
        crowd.check([each.work.num_out for each in due])
    return first_ms, late_ms


def _xadd(keys: Keys, request_id: str, arrival: Arrival) -> bytes:
    job = build(job_options(arrival.work), request_id)
    packed: bytes = _HIREDIS.pack_command(("XADD", keys.jobs(), "*", "id", job.id, job.field, job.payload, "v", "1"))
    return packed


def library_client(url: str, keys: Keys, due: Sequence[Arrival]) -> Times:
    """One event loop. Raises RunError or a HeadraceError if an answer is not what was asked."""
    return asyncio.run(_library_client(url, keys, due))


async def _library_client(url: str, keys: Keys, due: Sequence[Arrival]) -> Times:
    first_ms, late_ms = [0.0] * len(due), [0.0] * len(due)
    async with AsyncClient(url, prefix=keys.prefix, queue=keys.queue) as client:

        async def one(number: int) -> None:
            request_id, called_s = f"first-{number}", time.perf_counter()
            late_ms[number] = (called_s - begun_s - due[number].at_s) * 1e3
            await client.submit(id=request_id, **job_options(due[number].work))
            tokens = 0
            async with client.stream(request_id) as stream:
                async for event in stream:
                    if isinstance(event, Tokens | Finished):
                        if not tokens and event.token_ids:
                            first_ms[number] = (time.perf_counter() - called_s) * 1e3
                        tokens += len(event.token_ids)
            if tokens != due[number].work.num_out:
                raise RunError(f"{request_id} gave {tokens} tokens, not {due[number].work.num_out}")

        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, each in enumerate(due):
                await asyncio.sleep(max(0.0, each.at_s - (time.perf_counter() - begun_s)))
                group.create_task(one(number))
    return first_ms, late_ms
