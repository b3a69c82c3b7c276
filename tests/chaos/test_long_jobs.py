"""Jobs longer than any lease, jobs that kill whoever runs them, and the joints between attempts."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

from headrace.clients.keys import Keys
from tests.support.chaos_model import POISON
from tests.support.chaos_oracle import expected
from tests.support.chaos_queue import ChaosQueue, StallWatch, unless_stalled
from tests.support.chaos_workers import Worker
from tests.support.worker_process import wait_until


def test_a_job_longer_than_its_lease_is_delivered_once(
    chaos_queue: ChaosQueue, spawn: Callable[..., Worker], is_full: bool, progress: Callable[[str], None]
) -> None:
    """I10: thirty leases long, two idle workers that look for abandoned jobs all the time, one attempt."""
    job_s, lease_s = (60.0, 2.0) if is_full else (6.0, 0.5)
    options = {"lease_s": lease_s, "block_s": 0.1, "step_time_s": job_s / 120}
    workers = [spawn(chaos_queue, **options) for _ in range(3)]
    for worker in workers:
        worker.wait_ready()

    def run() -> None:
        request_id = f"job-{len(chaos_queue.jobs)}"
        begun_s = time.monotonic()
        chaos_queue.add(request_id, prompt="Hello", seed=5, max_tokens=120, ignore_eos=True)
        chaos_queue.wait_empty(timeout_s=job_s * 5)
        took_s = time.monotonic() - begun_s
        attempts = chaos_queue.report(request_id).attempts
        progress(f"{took_s:.1f} s under a lease of {lease_s} s: {len(attempts)} attempt")
        assert took_s >= job_s
        assert len(attempts) == 1

    unless_stalled(run, stall_s=lease_s / 2)
    chaos_queue.judge()


def test_poison_is_given_up_and_nobody_else(
    chaos_queue: ChaosQueue, spawn: Callable[..., Worker], is_full: bool, progress: Callable[[str], None]
) -> None:
    """A prompt that kills its worker in the step, among jobs that do not: dead after three attempts, alone."""
    for number in range(60 if is_full else 10):
        chaos_queue.add(f"good-{number}", prompt=f"Hello {number}", seed=number, max_tokens=40)
        if number == 3:
            chaos_queue.add("poison", prompt_token_ids=[72, POISON, 73], max_tokens=5)
    crew = [spawn(chaos_queue, step_time_s=0.01, lease_s=0.6) for _ in range(2)]
    num_killed = 0
    end_s = time.monotonic() + 90
    while chaos_queue.producer.num_left():
        assert time.monotonic() < end_s, [worker.output()[-2000:] for worker in crew]
        for index, worker in enumerate(crew):
            if not worker.is_alive:
                assert worker.code == -signal.SIGKILL
                num_killed += 1
                crew[index] = spawn(chaos_queue, step_time_s=0.01, lease_s=0.6)
        time.sleep(0.02)
    found = chaos_queue.judge()
    progress(f"{num_killed} workers killed, {found.num_attempts} attempts, ends {dict(found.reasons)}")
    assert num_killed == 3
    assert [entry[b"id"] for entry in found.dead] == [b"poison"]
    assert found.reports["poison"].error_code == "attempts_exhausted"
    assert len(found.reports["poison"].attempts) == 4  # the last one ends it, and runs nothing
    assert found.dead[0][b"attempts"] == b"4"
    assert set(found.errors) == {"poison"}


TEXT: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 70}


def _seam_jobs() -> dict[str, tuple[dict[str, Any], list[int]]]:
    """Jobs by name, each with the token positions at which its workers die: the worst there are."""
    seed = next(seed for seed in range(10_000) if "👩‍👩‍👧" in expected({"prompt": "emoji", **TEXT}, seed).text[3:20])
    ids = expected({"prompt": "emoji", **TEXT}, seed).token_ids
    at = bytes(token % 256 for token in ids).index("👩‍👩‍👧".encode())
    emoji = {"prompt": "emoji", "seed": seed, **TEXT}
    stopping = {"prompt": "stop", "stop": ["three four"], **TEXT}
    seed = next(seed for seed in range(10_000) if 20 < len(expected(stopping, seed).token_ids) < 60)
    length = len(expected(stopping, seed).token_ids)
    choices = {"prompt": "choices", "seed": 3, "n": 3, "logprobs": 2, "prompt_logprobs": 1, **TEXT}
    return {
        "emoji": (emoji, [at + 2, at + 5, at + 15]),  # in a character; before a joiner; in the last one
        "stop": ({**stopping, "seed": seed}, [length - 9, length - 4, length - 1]),
        "choices": (choices, [1, 13, 40]),
    }


def test_killed_in_the_middle(chaos_queue: ChaosQueue, spawn: Callable[..., Worker]) -> None:
    """Of an emoji, of a stop string, of choices with log-probabilities: three times each, and nobody can tell.

    Each of the three jobs has a queue of its own, so that each worker dies of its own fate.
    """
    jobs = _seam_jobs()
    fates: dict[str, list[list[Any]]] = {}
    crew: dict[str, Worker] = {}

    def next_worker(name: str) -> None:
        options = {"queue": name, "step_time_s": 0.005, "lease_s": 0.6, "fates": fates[name][:1]}
        crew[name] = spawn(chaos_queue, **options)
        del fates[name][:1]

    for name, (job, cuts) in jobs.items():
        chaos_queue.jobs[name] = job
        chaos_queue.raw.xadd(Keys(chaos_queue.prefix, name).jobs(), {"id": name, "json": json.dumps(job)})
        in_choice = [number if job.get("n") else 0 for number in range(3)]
        fates[name] = [[name, cut, int(signal.SIGKILL), choice] for cut, choice in zip(cuts, in_choice, strict=True)]
        next_worker(name)
    end_s = time.monotonic() + 60
    while not all(chaos_queue.report(name).end for name in jobs):
        assert time.monotonic() < end_s, [worker.output()[-2000:] for worker in crew.values()]
        for name in [each for each in crew if not crew[each].is_alive]:
            assert crew[name].code == -signal.SIGKILL
            next_worker(name)
        time.sleep(0.01)
    wait_until(lambda: not any(chaos_queue.raw.xlen(Keys(chaos_queue.prefix, name).jobs()) for name in jobs))
    found = chaos_queue.judge()  # compares with the undisturbed answers
    for name, (job, cuts) in jobs.items():
        attempts = found.reports[name].attempts
        assert len(attempts) == 4
        if "n" not in job:
            assert [sum(each.num_tokens for each in attempts[: k + 1]) for k in range(3)] == cuts


def test_a_stall_is_seen() -> None:
    """What excuses a test that depends on time: a machine that stood still."""
    watch = StallWatch(sleep=lambda: time.sleep(0.3))
    with watch:
        wait_until(lambda: watch.num_beats > 0)
    assert watch.longest_s >= 0.3
