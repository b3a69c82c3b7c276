"""What was read of a stream before a failover counts for nothing after it: it is read again before acknowledging."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import pytest

from headrace.worker import lua
from tests.support.proxy import Proxy
from tests.support.rig import Rig, abandon
from tests.support.worker_process import wait_until

# How many tokens have settled, and what the connection is lost at: the acknowledgement, or the second part of a
# stream of which the first, as long as one reply may be, had the end.
CASES = {"acknowledgement": (3, (lua.ACKNOWLEDGE.sha.encode(),)), "second part": (498, (b"XRANGE", b"(1000-499"))}


def tell(rig: Rig, entry_id: str, num_tokens: int, *, is_whole: bool) -> None:
    """Make a request's stream as a worker has left it, or a replica that lacks its end."""
    out, job = rig.keys.out("my-1"), f"{rig.keys.jobs()} {entry_id}"
    payload = rig.client.xrange(rig.keys.jobs(), entry_id, entry_id)[0][1][b"json"]
    started = {"e": "started", "attempt": 1, "worker": "dead-worker", "job": job, "resumed": [0], "seed": 3}
    started |= {"fp": hashlib.sha256(payload).hexdigest(), "model": {"name": "scripted", "fingerprint": "f" * 64}}
    events = [started, *({"e": "tokens", "i": i, "t": [104], "x": "h"} for i in range(num_tokens))]
    usage = {"prompt": 6, "completion": num_tokens, "cached": 0}
    if is_whole:
        events.append({"e": "finished", "i": num_tokens, "reason": "length", "usage": usage, "done": True})
    with rig.client.pipeline(transaction=True) as pipeline:
        pipeline.delete(out)
        for number, event in enumerate(events):
            pipeline.xadd(out, {"json": json.dumps(event)}, id=f"1000-{number}")
        pipeline.pexpire(out, 600_000)
        pipeline.execute()


@pytest.mark.parametrize("case", CASES)
def test_an_end_that_a_failover_takes_back_is_not_acknowledged(
    proxy_to: Callable[..., Proxy], rig: Rig, case: str
) -> None:
    """The first worker ended the request and died; the second has read that when its server goes, too."""
    num_tokens, needles = CASES[case]
    entry_id = abandon(rig, "my-1", {"prompt": "Hello", "max_tokens": num_tokens, "ignore_eos": True})
    tell(rig, entry_id, num_tokens, is_whole=True)
    proxy = proxy_to(rig.server)
    loss = proxy.lose_reply(*needles, before=True, count=10**6)
    worker = rig.worker(url=proxy.url)
    wait_until(lambda: loss.num_lost > 0)
    proxy.refuse()
    tell(rig, entry_id, num_tokens - 1, is_whole=False)
    loss.count = 0
    proxy.accept()
    rig.wait_empty()
    assert rig.is_done("my-1")
    assert rig.num_tokens("my-1") == num_tokens
    assert worker.counters.attempts == 1
