"""What may be wrong with the queue, with rights and with keys. Each check is a function of everything seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ..options import HOUR_S
from ..status import HANDED_BACK, WorkerStatus
from ..table import printable
from .findings import Finding, error, warning
from .seen import Seen

_WAITED_S: Final = 10.0  # a job that nobody has taken for so long, though somebody could
_SPARE_S: Final = 10.0  # beyond two leases: an abandoned job that no worker has taken over
_AHEAD_S: Final = 1.0
_NEAR_TTL: Final = 0.8
_SHOWN: Final = 3


def rights(seen: Seen) -> Iterator[Finding]:
    """A user that may do neither all that a worker does nor all that a client does is no use."""
    for node in seen.nodes:
        if len(node.lacking) > 1:
            worker, client = (" ".join(node.lacking[role]) for role in ("worker", "client"))
            yield error(
                "rights",
                f"user {printable(seen.user)} lacks rights: {worker} to be a worker, {client} to be a client",
                f"run ACL SETUSER {printable(seen.user)} with the rules of what it is to be, and keep them (ACL SAVE)",
            )
            return


def refusals(seen: Seen) -> Iterator[Finding]:
    """What this user may not look at may be anything."""
    for what in seen.refused:
        yield warning("not-seen", f"could not look at {printable(what)}", "call it as a user that may")


def key_types(seen: Seen) -> Iterator[Finding]:
    """A key of the queue that is something else stops it."""
    for name, kind in seen.queue.foreign if seen.queue else ():
        yield error(
            "key-type",
            f"{name} is a {kind} and not a stream: no job can be added or taken",
            f"find out whose it is, and rename it (RENAME) or choose another --queue than {seen.keys.queue}",
        )


def workers(seen: Seen) -> Iterator[Finding]:
    """Nobody is there, or nobody takes."""
    queue = seen.queue
    if queue is None or queue.foreign:
        return
    takers = [each for each in queue.alive if each.state == "running"]
    waits = f"{_jobs(queue.num_waiting)} wait{'s' * (queue.num_waiting == 1)}"
    if not queue.alive:
        used = any(line.oldest_s is not None for line in queue.lines) or queue.workers
        others = [name for name in seen.stored.queues if name != seen.keys.queue]
        hint = f" (there are others: {', '.join(others[:_SHOWN])})" if others and not used else ""
        what = f"queue {seen.keys.queue} has no worker" + (f", and {waits}" if queue.num_waiting else hint)
        make = error if queue.num_waiting or queue.num_taken else warning
        yield make("no-worker", what, f"start one: headrace worker --model MODEL --queue {seen.keys.queue}")
    elif not takers and queue.num_waiting:
        states = ", ".join(f"{each.name} is {each.state}" for each in queue.alive[:_SHOWN])
        yield error("no-taker", f"{waits}, and no worker takes any: {states}", "start another worker")


def idle_workers(seen: Seen) -> Iterator[Finding]:
    """Jobs wait, and a worker has none."""
    queue = seen.queue
    if queue is None or queue.oldest_waiting_s <= _WAITED_S:
        return
    for worker in queue.alive:
        if worker.state == "running" and not worker.pending:
            yield warning(
                "idle-worker",
                f"worker {worker.name} ({_place(worker)}) has no job, and {_jobs(queue.num_waiting)} wait, "
                f"the oldest for {_age(queue.oldest_waiting_s)}",
                "look at its log: it cannot take, or hangs; end it, and start it again",
            )


def stuck_workers(seen: Seen) -> Iterator[Finding]:
    """Its step loop stands still: it says so itself."""
    for worker in seen.queue.alive if seen.queue else ():
        if worker.state == "stuck":
            yield error(
                "stuck-worker",
                f"worker {worker.name} ({_place(worker)}) says that its step loop stands still; it has "
                f"{_jobs(worker.pending)}",
                "end it (SIGKILL if need be) and start it again: its jobs go to other workers",
            )


def abandoned(seen: Seen) -> Iterator[Finding]:
    """Jobs that were taken, that nobody renews, and that nobody takes over."""
    queue = seen.queue
    if queue is None:
        return
    pending = [each for line in queue.lines for each in line.pending]
    if not queue.alive:
        late = [each for each in pending if each.idle_s > seen.lease_s]
        do = f"start a worker: headrace worker --queue {seen.keys.queue}"
        why = "and there is no worker to take them over"
    else:
        # What was handed back says nothing of how long it waits, and full workers take over as room comes.
        most_s = 2 * seen.lease_s + _SPARE_S
        late = [each for each in pending if each.idle_s > most_s and each.consumer != HANDED_BACK]
        do = "look at the workers' logs: they are full, serve another model, or cannot read the requests' streams"
        why = "and no worker takes them over"
    if late:
        make = warning if queue.alive else error
        owners = _some(sorted({"nobody" if each.consumer == HANDED_BACK else each.consumer for each in late}))
        were = "was" if len(late) == 1 else "were"
        what = f"{_jobs(len(late))} taken by {owners} {were} not renewed for longer than the lease ({seen.lease_s:g} s)"
        yield make("abandoned", f"{what}, {why}", do)


def dead_consumers(seen: Seen) -> Iterator[Finding]:
    """Workers that went without a word."""
    gone = [each for each in (seen.queue.workers if seen.queue else ()) if each.state == "gone"]
    for worker in gone[:_SHOWN]:
        yield warning(
            "dead-consumer",
            f"worker {printable(worker.name)} gives no sign of life; it has {_jobs(worker.pending)}",
            "find out why it ended; a running worker takes over its jobs after a lease, "
            "and takes its name off after some minutes",
        )
    if len(gone) > _SHOWN:
        jobs = _jobs(sum(each.pending for each in gone[_SHOWN:]))
        yield warning("dead-consumer", f"so do {len(gone) - _SHOWN} more, with {jobs}", "as above")


def models(seen: Seen) -> Iterator[Finding]:
    """A job begun with one model cannot go on with another."""
    by_model: dict[str, list[str]] = {}
    for worker in seen.queue.alive if seen.queue else ():
        name, fingerprint = worker.fields.get("model", "?"), worker.fields.get("fingerprint", "?")
        by_model.setdefault(f"{name} ({fingerprint[:8]})", []).append(worker.name)
    if len(by_model) > 1:
        each = "; ".join(f"{printable(model)} on {_some(names)}" for model, names in by_model.items())
        yield warning(
            "models",
            f"workers of one queue serve different models: {each}",
            "give each model a queue of its own; answers come from either, and jobs cannot go from one to the other",
        )


def leases(seen: Seen) -> Iterator[Finding]:
    """One value per queue."""
    found = sorted({each.fields.get("lease_s", "?") for each in (seen.queue.alive if seen.queue else ())})
    if len(found) > 1:
        yield warning(
            "leases",
            f"workers of one queue have different leases: {', '.join(found)} s",
            "give all the same --lease: with a shorter one a worker takes jobs from others that still run them",
        )


def dead_letters(seen: Seen) -> Iterator[Finding]:
    """Jobs that were given up wait for a person."""
    num_dead = seen.queue.num_dead if seen.queue else 0
    if num_dead:
        yield warning(
            "dead-letters",
            f"{_jobs(num_dead)} given up",
            f"headrace dead ls --queue {seen.keys.queue} says why; then dead retry or dead purge",
        )


def old_jobs(seen: Seen) -> Iterator[Finding]:
    """A job is not begun in the last hour of `queue_ttl`."""
    most_s = seen.queue_ttl_s - HOUR_S
    for line in seen.queue.lines if seen.queue else ():
        if line.oldest_s is not None and line.oldest_s >= most_s * _NEAR_TTL:
            late = line.oldest_s >= most_s
            yield (error if late else warning)(
                "old-job",
                f"the oldest job of priority {line.status.priority} is {_age(line.oldest_s)} old; from {_age(most_s)} "
                f"on a job {'is' if late else 'will be'} ended with `deadline` instead of being run",
                "start more workers, or submit less",
            )


def ids_ahead(seen: Seen) -> Iterator[Finding]:
    """Ids are times: from one in the future on, all that follow are of that time."""
    queue = seen.queue
    if queue is None:
        return
    newest = [(line.key, line.newest_ahead_s) for line in queue.lines]
    for name, ahead_s in (*newest, (seen.keys.dead, queue.newest_dead_ahead_s)):
        if ahead_s > _AHEAD_S:
            yield warning(
                "ids-ahead",
                f"the newest id of {name} is {_age(ahead_s)} ahead of the server's clock: "
                "jobs added from now on count as younger than they are, and time limits begin late",
                "set the server's clock right (NTP); nobody may add entries with ids of their own",
            )


def lasting_keys(seen: Seen) -> Iterator[Finding]:
    """Only `jobs…` and `dead` may stay for ever."""
    for kind in seen.stored.kinds:
        if kind.num_lasting:
            yield warning(
                "no-ttl",
                f"{kind.num_lasting} of {kind.num_keys} keys of kind {kind.kind} stay for ever: {_some(kind.lasting)}"
                + (" …" if kind.num_lasting > len(kind.lasting) else ""),
                "nothing of Headrace writes such a key: find out who does, then PEXPIRE it or DEL it",
            )


QUEUE_CHECKS: Final[tuple[Callable[[Seen], Iterator[Finding]], ...]] = (
    rights,
    refusals,
    key_types,
    workers,
    stuck_workers,
    abandoned,
    idle_workers,
    dead_consumers,
    models,
    leases,
    dead_letters,
    old_jobs,
    ids_ahead,
    lasting_keys,
)


def _jobs(count: int) -> str:
    return f"{count:,} job{'s' * (count != 1)}"


def _place(worker: WorkerStatus) -> str:
    return printable(f"pid {worker.fields.get('pid', '?')} on {worker.fields.get('host', '?')}")


def _some(names: Iterable[str]) -> str:
    shown = [printable(name) for name in names]
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def _age(seconds: float) -> str:
    """As people say it: `45 s`, `12 min`, `19.2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
