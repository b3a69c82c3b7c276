"""What a server's memory holds per queued job and per stream: the figures behind docs/operations.md.

Each kind of thing is made some hundreds or thousands of times on an empty server, by the commands and the script that
a client and a worker send, and what `used_memory` grew by is divided by their number. It does not depend on how busy
the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

from headrace.clients.entries import encode, format_id, to_map
from headrace.clients.events import EntryId, Event, Finished, JobRef, ModelRef, Queued, Started, Timing, Tokens, Usage
from headrace.clients.keys import GROUP, Keys
from headrace.clients.lua import APPEND
from headrace.clients.payload import Kind

from .rig import PREFIX, connect, server
from .sections import Section, Table
from .servers import binaries, name_of
from .settings import Say, Settings

Command = tuple[str | bytes | int, ...]
KEYS = Keys(PREFIX)
PAYLOADS = (100, 1_000, 8_000)  # bytes
TOKENS = (1, 16, 64, 256, 1_024)
JOINED = 10  # tokens an entry, as with --flush-interval 100ms at 100 tokens a second
SMALL_NODE_BYTES = 512  # of stream-node-max-bytes, whose default is 4096
READER = "connection that waits for a stream"
_FP, _A = "0123456789abcdef" * 4, 1_800_000_000_000
_PER_PIPELINE = 200


@dataclass(frozen=True, slots=True)
class Thing:
    """Something that a server keeps: `commands(i)` makes the i-th."""

    name: str
    commands: Callable[[int], Iterable[Command]]
    entries: int = 1  # that one takes, so that not too many are made


@dataclass(frozen=True, slots=True)
class Cost:
    """One measurement."""

    server: str
    node_bytes: int  # stream-node-max-bytes
    thing: str
    count: int
    bytes_each: float


def job(i: int, num_bytes: int) -> Command:
    """A bare job with a payload of so many bytes."""
    return ("XADD", KEYS.jobs(), "*", "id", f"{i:032x}", "job", b"x" * num_bytes, "v", "1")


def taken(i: int) -> Iterator[Command]:
    """A job that a worker has taken."""
    if i == 0:
        yield ("XGROUP", "CREATE", KEYS.jobs(), GROUP, "0", "MKSTREAM")
    yield job(i, PAYLOADS[0])
    yield ("XREADGROUP", "GROUP", GROUP, "worker-1-abcdef01", "COUNT", 1, "STREAMS", KEYS.jobs(), ">")


def events(num_tokens: int, per_entry: int = 1, *, ended: bool = False) -> Iterator[Event]:
    """A request's stream with so many tokens of five characters."""
    yield Queued((0, _A), _FP)
    if not num_tokens:
        return
    started = JobRef(KEYS.jobs(), f"{_A}-0")
    yield Started((_A, 0), 1, "worker-1-abcdef01", started, (), 2**62, _FP, ModelRef("a-model", _FP))
    starts = list(range(0, num_tokens, per_entry))
    for number, index in enumerate(starts):
        ids = tuple(range(20_000 + index, 20_000 + min(index + per_entry, num_tokens)))
        at, text = (_A, number + 1), " word" * len(ids)
        if ended and index == starts[-1]:  # the last tokens travel with the end
            timing, usage = Timing(1.25, 20.5, 22.75, 1234.5), Usage(100, num_tokens)
            yield Finished(at, "length", done=True, usage=usage, timing=timing, index=index, token_ids=ids, text=text)
        else:
            yield Tokens(at, index, ids, text)


def stream(i: int, told: Iterable[Event], kind: Kind = "d") -> Iterator[Command]:
    """A request's stream, written as clients and workers do."""
    out, flag = KEYS.out(f"{i:032x}"), KEYS.cancel(f"{i:032x}")
    newest: EntryId | None = None
    for event in told:
        seen = "" if newest is None else format_id(newest)
        ttl_ms = 600_000 if isinstance(event, Finished) else 86_400_000
        yield (
            *("EVALSHA", APPEND.sha, 2, out, flag, seen, format_id(event.id)),
            *(*encode(to_map(event), kind), ttl_ms, "0"),
        )
        newest = event.id


def things() -> Iterator[Thing]:
    """Everything that is measured."""
    for num_bytes in PAYLOADS:
        yield Thing(f"job, waiting, payload of {num_bytes:,} B", lambda i, n=num_bytes: [job(i, n)])
    yield Thing(f"job, taken, payload of {PAYLOADS[0]:,} B", taken)
    yield Thing("stream, queued only", lambda i: stream(i, events(0)))
    for num in TOKENS:
        yield Thing(f"stream, {num:,} tokens", lambda i, n=num: stream(i, events(n)), num)
    for num in TOKENS[-2:]:
        name = f"stream, {num:,} tokens, {JOINED} an entry"
        yield Thing(name, lambda i, n=num: stream(i, events(n, JOINED)), num // JOINED)
    num = TOKENS[-2]
    yield Thing(f"stream, {num:,} tokens, in JSON", lambda i: stream(i, events(num), "json"), num)
    yield Thing(f"stream, {num:,} tokens, ended", lambda i: stream(i, events(num, ended=True)), num)


def measure(client: Any, thing: Thing, count: int) -> float:
    """Bytes that each of `count` takes on an emptied server."""
    client.execute_command("FLUSHALL", "SYNC")
    client.script_load(APPEND.source)
    before = used_bytes(client)
    commands = chain.from_iterable(thing.commands(i) for i in range(count))
    while part := list(islice(commands, _PER_PIPELINE)):
        pipeline = client.pipeline(transaction=False)
        for command in part:
            pipeline.execute_command(*command)
        pipeline.execute()
    return (used_bytes(client) - before) / count


def measure_connections(client: Any, count: int) -> float:
    """Bytes that each of `count` connections takes that waits for a stream."""
    before, pool = used_bytes(client), client.connection_pool
    waiting = [pool.get_connection() for _ in range(count)]
    for each in waiting:
        each.send_command("XREAD", "BLOCK", 0, "STREAMS", KEYS.out("nobody"), "0-0")
    while client.info("clients")["blocked_clients"] < count:
        time.sleep(0.01)
    each_bytes = (used_bytes(client) - before) / count
    for each in waiting:
        each.disconnect()
        pool.release(each)
    return each_bytes


def used_bytes(client: Any) -> int:
    """What the server's allocator has given out."""
    return int(client.info("memory")["used_memory"])


def section(settings: Settings, say: Say) -> Section:
    """Everything, on every server."""
    costs: list[Cost] = []
    least, most_entries = (5, 1_000) if settings.quick else (20, 10_000)
    for binary in binaries()[: 1 if settings.quick else None]:
        for node_bytes in (4096, SMALL_NODE_BYTES):
            with (
                server("--stream-node-max-bytes", str(node_bytes), binary=binary) as running,
                connect(running.url) as client,
            ):
                name = name_of(client.info("server"))
                say(f"{name}, stream-node-max-bytes {node_bytes}")
                for thing in things():
                    count = max(least, most_entries // thing.entries)
                    costs.append(Cost(name, node_bytes, thing.name, count, measure(client, thing, count)))
                count = 50  # redis-py lends no more than 100
                costs.append(Cost(name, node_bytes, READER, count, measure_connections(client, count)))
    return report(costs)


def report(costs: list[Cost]) -> Section:
    """A table of all servers beside each other."""
    columns = list(dict.fromkeys((cost.server, cost.node_bytes) for cost in costs))
    by_place = {(cost.thing, cost.server, cost.node_bytes): cost.bytes_each for cost in costs}
    rows = tuple(
        (thing, *(round(by_place[thing, *column]) for column in columns))
        for thing in dict.fromkeys(cost.thing for cost in costs)
    )
    heads = [name if node_bytes == 4096 else f"{name}, nodes of {node_bytes}" for name, node_bytes in columns]
    fitted = tuple(
        (head, *(round(each, 1) for each in fit(costs, *column))) for head, column in zip(heads, columns, strict=True)
    )
    return Section(
        name="memory",
        title="What a server's memory holds",
        how="Each thing is made many times on an empty server by what clients and workers send; `used_memory`, "
        "divided. Tokens are five characters each. A stream is allocated in nodes of `stream-node-max-bytes` (4096 "
        "unless it is set), the first one at once, whatever is in it.",
        tables=(
            Table("Bytes each", ("", *heads), rows),
            Table(
                "Bytes, as a formula",
                (
                    "server",
                    "job, beside its payload",
                    "taken, more",
                    "stream, least",
                    "stream, each token",
                    "joined tokens, each",
                ),
                fitted,
            ),
        ),
        raw={"costs": [asdict(cost) for cost in costs]},
    )


def fit(costs: list[Cost], name: str, node_bytes: int) -> tuple[float, float, float, float, float]:
    """Of one server: a job beside its payload, what is more of a taken one, a stream's least, and bytes a token."""
    found = {cost.thing: cost.bytes_each for cost in costs if (cost.server, cost.node_bytes) == (name, node_bytes)}
    few, many = TOKENS[-2:]
    waiting = found[f"job, waiting, payload of {PAYLOADS[0]:,} B"]
    joined = found[f"stream, {many:,} tokens, {JOINED} an entry"] - found[f"stream, {few:,} tokens, {JOINED} an entry"]
    return (
        max(found[f"job, waiting, payload of {size:,} B"] - size for size in PAYLOADS[:2]),
        found[f"job, taken, payload of {PAYLOADS[0]:,} B"] - waiting,
        found["stream, queued only"],
        (found[f"stream, {many:,} tokens"] - found[f"stream, {few:,} tokens"]) / (many - few),
        joined / (many - few),
    )
