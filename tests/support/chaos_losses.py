"""What a failover has lost: replication is asynchronous, so the last of what a dead master acknowledged may be gone.

A replica is watched until it takes over (`watch_promotion`). What it had just before tells the server's losses from
ours: ids of jobs count up with the clock, so a job that was acknowledged later than the newest job it ever saw had not
reached it; and a request whose stream it lacks had not been told of.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import redis

from headrace.clients import ExpiredError
from headrace.clients.entries import parse_id
from headrace.clients.events import EntryId
from headrace.clients.keys import Keys
from tests.support.chaos_checker import Judgement, require
from tests.support.chaos_traffic import Request
from tests.support.server import Server

_SLACK_MS = 5.0  # a server's clock stands still within a turn of its loop


@dataclass
class Failover:
    """What a replica had when it took over from its master."""

    at_ms: float  # wall clock: from here on what is acknowledged is not lost in this failover any more
    has: Callable[[str], bool]  # whether a key is one of its
    newest_jobs: dict[str, EntryId]  # by stream of jobs: the newest it ever had
    streams: frozenset[str]  # ids of the requests whose streams it had
    writers_died: bool = False  # and so nobody could write again what it lacked


def watch_promotion(
    node: Server, keys: Keys, has: Callable[[str], bool], begin: Callable[[], object], timeout_s: float = 40.0
) -> Failover:
    """Look at a replica again and again from before `begin()` until it is a master."""
    client = redis.Redis(port=node.port, protocol=2, single_connection_client=True)
    with contextlib.suppress(redis.ResponseError):  # no node of a cluster
        client.execute_command("READONLY")
    seen = _Seen()
    assert _look(client, keys, seen), "it is the master already"
    begin()
    end_s = time.monotonic() + timeout_s
    while _look(client, keys, seen):
        assert time.monotonic() < end_s, "the replica does not take over"
        time.sleep(0.005)
    client.close()
    return Failover(time.time() * 1000, has, seen.newest, seen.streams)


def kill_ahead(master: Server, replica: Server, lag_s: float) -> None:
    """Kill a master whose replica lacks what was written in the last `lag_s` seconds."""
    replica.freeze()
    with master.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "replica")
    time.sleep(lag_s)
    master.kill()
    replica.thaw()


@dataclass
class _Seen:
    """What a replica had when it was looked at last."""

    newest: dict[str, EntryId] = field(default_factory=dict[str, EntryId])
    streams: frozenset[str] = frozenset()


def _look(client: redis.Redis, keys: Keys, seen: _Seen) -> bool:
    """Look at what a replica has. False: it is a master."""
    if client.execute_command("ROLE")[0] == b"master":
        return False
    for stream in keys.all_jobs:
        try:
            told = client.xinfo_stream(stream)
        except redis.exceptions.ClusterDownError:
            continue  # a replica that knows its master to be dead gives nothing away, nor gets anything new
        except redis.ResponseError:  # it has no such stream, or another node has
            seen.newest[stream] = (0, 0)
        else:
            seen.newest[stream] = parse_id(told["last-generated-id"])
    head, tail = f"{keys.prefix}:req:{{", "}:out"
    names = [key.decode() for key in client.keys(f"{head}*{tail}")]
    seen.streams = frozenset(name[len(head) : -len(tail)] for name in names)
    return True


@dataclass
class Losses:
    """Which requests a server has lost in its failovers, of those that have not ended as they should."""

    keys: Keys
    failovers: list[Failover] = field(default_factory=list[Failover])

    def lost_job(self, request: Request) -> bool:
        """Whether the request's job was acknowledged by a master whose successor had not got it."""
        stream = self.keys.jobs(request.priority)
        # The library does not tell an entry's id: the latest that it can have is taken.
        entry_id = parse_id(request.entry_id) if request.entry_id else (int(request.added_ms + _SLACK_MS), 0)
        return any(
            each.has(stream) and request.begun_ms < each.at_ms and entry_id > each.newest_jobs[stream]
            for each in self.failovers
        )

    def lost_stream(self, request: Request) -> bool:
        """Whether the request's stream was there before a failover, or may have been, and not after it."""
        out = self.keys.out(request.id)
        return any(
            each.has(out) and request.begun_ms < each.at_ms and request.id not in each.streams
            for each in self.failovers
        )

    def may_have_rewound(self, request: Request, *, writers_died: bool = False) -> bool:
        """Whether the end of the request's stream may have been lost in a failover."""
        out = self.keys.out(request.id)
        return any(
            each.has(out) and request.begun_ms < each.at_ms and (each.writers_died or not writers_died)
            for each in self.failovers
        )

    def excuses(self, request: Request) -> bool:
        """Whether the request need not have ended: its job was lost, or what a library had written before it, or its
        end, after the job had been acknowledged on another node, and together with whoever could write it again."""
        if self.lost_job(request) or self.may_have_rewound(request, writers_died=True):
            return True
        return not request.is_bare and self.lost_stream(request)

    def check(self, requests: Iterable[Request], found: Judgement, *, leases_kept: bool) -> tuple[int, int]:
        """Every request has ended and its reader was told all of it, or a failover is to blame.

        `leases_kept`: no worker has lost a job to another. Then those that live write again what a failover took, and a
        reader can only come to find nothing at all. Returns how many requests have not ended, and how many readers were
        told an error. Raises BrokenPromiseError.
        """
        num_lost = num_errors = 0
        for request in requests:
            if request.id not in found.reports or found.reports[request.id].end is None:
                require(self.excuses(request), f"{request.id} has not ended, and no failover has lost it")
                num_lost += 1
            elif request.error is not None:
                gone = isinstance(request.error, ExpiredError) and self.lost_stream(request)
                excuse = gone or self.may_have_rewound(request, writers_died=leases_kept)
                require(excuse, f"{request.id}: a reader was told {request.error!r}, and no failover is to blame")
            num_errors += request.error is not None
        return num_lost, num_errors
