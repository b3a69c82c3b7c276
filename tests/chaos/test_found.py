"""What this suite has found, each as a small case of its own."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from headrace.worker import lua
from tests.support.chaos_nursery import CANNOT_START
from tests.support.chaos_queue import ChaosQueue
from tests.support.chaos_workers import Worker
from tests.support.proxy import Proxy
from tests.support.rig import Rig, rig
from tests.support.scripted import ByteTokenizer
from tests.support.worker_process import wait_until

__all__ = ["rig"]


def test_a_connection_lost_while_starting_is_told_in_a_sentence(
    chaos_queue: ChaosQueue, proxy_to: Callable[..., Proxy], spawn: Callable[..., Worker]
) -> None:
    """It hid behind an error of the clean-up: a thread was joined that had never run."""
    proxy = proxy_to(chaos_queue.server)
    proxy.lose_reply(b"TIME")
    worker = spawn(proxy)
    assert worker.wait() == CANNOT_START
    assert "takes no writes" in worker.output() or "no server at" in worker.output()
    assert "Traceback" not in worker.output()
    chaos_queue.judge()


def test_a_duplicate_in_the_same_millisecond_does_not_end_the_other(
    chaos_queue: ChaosQueue, proxy_to: Callable[..., Proxy], spawn: Callable[..., Worker]
) -> None:
    """Both entries of a request come to one worker; the replies to the duplicate's acknowledgement are lost.

    The renewal then shows the duplicate to be gone. Dropping it took the sequence of the other, which both had begun
    under the same number, and the request hung for ever.
    """
    proxy = proxy_to(chaos_queue.server)
    for number in range(3):
        job = {"prompt": f"Hello {number}", "seed": number, "max_tokens": 40, "ignore_eos": True}
        chaos_queue.jobs[f"job-{number}"] = job
        for priority in ("high", "low"):
            entry = {"id": f"job-{number}", "json": json.dumps(job)}
            chaos_queue.raw.xadd(chaos_queue.keys.jobs(priority), entry)  # type: ignore[arg-type]
    # So often that a renewal, ten a second, comes in between; the longer it is out of reach, the longer the pauses.
    loss = proxy.lose_reply(lua.ACKNOWLEDGE.sha.encode(), count=4)
    worker = spawn(proxy, step_time_s=0.03, lease_s=0.3, max_num_seqs=12)
    chaos_queue.wait_empty(timeout_s=20)
    assert loss.num_lost > 0
    found = chaos_queue.judge()
    assert found.reasons == {"length": 3}
    worker.stop()
    assert worker.wait() == 0


class _SlowTokenizer(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        time.sleep(0.6)
        return super().encode(text)


def test_what_was_held_back_comes_out_though_cancelled_before_it_was_prepared(rig: Rig) -> None:
    """Half a character was settled; the next attempt is cancelled while its prompt is still being tokenised."""
    payload = json.dumps({"prompt": "Hello", "seed": 1})
    jobs, out = rig.keys.jobs(), rig.keys.out("my-1")
    rig.client.xgroup_create(jobs, "workers", "0", mkstream=True)
    entry_id = rig.add("my-1", payload)
    rig.client.xreadgroup("workers", "dead-worker", {jobs: ">"})
    rig.client.xclaim(jobs, "workers", "dead-worker", 0, [entry_id], idle=10**9, justid=True)
    started: dict[str, Any] = {"e": "started", "attempt": 1, "worker": "dead-worker", "job": f"{jobs} {entry_id}"}
    started |= {"resumed": [0], "seed": 1, "fp": hashlib.sha256(payload.encode()).hexdigest()}
    started["model"] = {"name": "scripted", "fingerprint": "f" * 64}
    for event_id, event in (("1000-0", started), ("1000-1", {"e": "tokens", "i": 0, "t": [0xF0]})):
        rig.client.xadd(out, {"json": json.dumps(event)}, id=event_id)
    rig.client.expire(out, 600)
    rig.worker(tokenizer=_SlowTokenizer(), cancel_poll_s=0.05)
    wait_until(lambda: len(rig.started("my-1")) == 2)
    rig.client.set(rig.keys.cancel("my-1"), "1", ex=60)
    finished = rig.wait_done("my-1")
    assert finished.reason == "cancelled"
    assert finished.text == "\ufffd"
