"""Workers that die, hang or fall behind: others go on where they were, and they themselves are kept out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.clients.events import Finished, Tokens
from tests.support.rig import Rig, abandon
from tests.support.scripted import ScriptedRunner
from tests.support.worker_process import WorkerProcess, wait_until

EMOJI = "né 世界 👩‍👩‍👧 " * 4
RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "seeded": ("hash", {"prompt": "Hello", "seed": 5, "temperature": 0.9}),
    "greedy": ("hash", {"prompt": "Hello", "temperature": 0}),
    "unseeded": ("hash", {"prompt": "Hello"}),
    "stop string, half of it told": ("echo", {"prompt": "one two three four five", "stop": ["three four"]}),
    "characters of several tokens": ("echo", {"prompt": EMOJI}),
    "log-probabilities": ("hash", {"prompt": "Hello", "seed": 5, "logprobs": 2, "prompt_logprobs": 1}),
    "three choices": ("hash", {"prompt": "Hello", "seed": 5, "n": 3}),
    "least length": ("hash", {"prompt": "Hello", "seed": 9, "min_tokens": 40, "ignore_eos": False}),
    "penalised": ("hash", {"prompt": "Hello", "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.5}),
}


@pytest.mark.parametrize("case", RESUMED)
def test_killed_on_the_way_the_answer_is_that_of_an_uninterrupted_run(
    start_worker: Callable[..., WorkerProcess], rig: Rig, case: str
) -> None:
    script, job = RESUMED[case]
    job = {"max_tokens": 60, "ignore_eos": script == "hash", **job}
    first = start_worker(rig.server, rig.prefix, script=script, step_time_s=0.02, lease_s=0.6)
    rig.add("my-1", job)
    rig.wait_tokens("my-1", 17 if "stop" in case else 11)
    first.kill()
    second = rig.worker(script=script, lease_s=0.6)
    rig.wait_done("my-1")
    assert second.counters.recovered == 1
    one, two = rig.started("my-1")
    assert two.attempt == 2
    assert sum(two.resumed) >= 11
    assert two.seed == one.seed
    rig.add("whole", {**job, "seed": one.seed})
    rig.wait_done("whole")
    resumed, whole = rig.told("my-1"), rig.told("whole")
    assert {index: (each.token_ids, each.text) for index, each in resumed.items()} == {
        index: (each.token_ids, each.text) for index, each in whole.items()
    }
    for index, each in whole.items():
        ended, other = resumed[index].finished, each.finished
        assert ended is not None
        assert other is not None
        assert (ended.reason, ended.stop) == (other.reason, other.stop)
    assert logprobs(rig, "my-1") == logprobs(rig, "whole")


def logprobs(rig: Rig, request_id: str) -> tuple[list[Any], list[Any]]:
    """All log-probabilities of a request, and all those of its prompt."""
    events = [event for event in rig.events(request_id) if isinstance(event, Tokens | Finished)]
    ordered = sorted(events, key=lambda event: event.choice)
    return (
        [each for event in ordered for each in event.logprobs or ()],
        [event.prompt_logprobs for event in events if event.prompt_logprobs is not None],
    )


def test_killed_twice_and_resumed_twice(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    rig.add("my-1", {"prompt": "Hello", "seed": 5, "max_tokens": 60, "ignore_eos": True})
    for count in (10, 25):
        worker = start_worker(rig.server, rig.prefix, step_time_s=0.02, lease_s=0.6)
        rig.wait_tokens("my-1", count)
        worker.kill()
    rig.worker(lease_s=0.6)
    rig.wait_done("my-1")
    assert [event.attempt for event in rig.started("my-1")] == [1, 2, 3]
    assert rig.num_tokens("my-1") == 60


def test_many_jobs_killed_after_their_first_token(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    first = start_worker(rig.server, rig.prefix, step_time_s=0.02, lease_s=1.0, max_num_seqs=50)
    for number in range(50):
        rig.add(f"my-{number}", {"prompt": f"Hello {number}", "max_tokens": 20, "ignore_eos": True})
    wait_until(lambda: all(rig.num_tokens(each) >= 1 for each in rig.submitted))
    first.kill()
    rig.worker(lease_s=1.0, max_num_seqs=50)
    rig.wait_done(*rig.submitted)
    assert all(rig.num_tokens(each) == 20 for each in rig.submitted)


def test_a_choice_that_has_ended_is_not_run_again(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    job = {"prompt": "Hello", "seed": 5, "n": 4, "max_tokens": 100}
    first = start_worker(rig.server, rig.prefix, step_time_s=0.03, lease_s=1.0, eos_every=24)
    rig.add("my-1", job)
    wait_until(lambda: any(isinstance(event, Finished) for event in rig.events("my-1")))
    assert not rig.is_done("my-1")
    first.kill()
    rig.worker(lease_s=1.0)
    rig.wait_done("my-1")
    finished = [event.choice for event in rig.events("my-1") if isinstance(event, Finished)]
    assert sorted(finished) == [0, 1, 2, 3]
    rig.add("whole", job)
    rig.wait_done("whole")
    assert {index: each.token_ids for index, each in rig.told("my-1").items()} == {
        index: each.token_ids for index, each in rig.told("whole").items()
    }


def test_poison_is_given_up_after_three_attempts(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    """A job that kills whoever runs it: three workers die of it, the fourth ends it and puts it away."""
    poison = 33
    rig.submit("poison", {"prompt": "x!", "max_tokens": 5})
    for _ in range(3):
        worker = start_worker(rig.server, rig.prefix, lease_s=1.0, kill_token_id=poison, wait=False)
        assert worker.wait() == 70
    last = start_worker(rig.server, rig.prefix, lease_s=1.0, kill_token_id=poison)
    finished = rig.wait_done("poison")
    assert finished.error is not None
    assert finished.error.code == "attempts_exhausted"
    assert [event.attempt for event in rig.started("poison")] == [1, 2, 3, 4]
    rig.wait_empty()
    [entry] = rig.dead()
    assert (entry[b"reason"], entry[b"attempts"], entry[b"id"]) == (b"attempts_exhausted", b"4", b"poison")
    rig.add("good", {"prompt": "x", "max_tokens": 5})
    rig.wait_done("good")
    last.stop()
    assert last.wait() == 0


def test_after_two_charged_attempts_a_request_runs_alone(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    """Two workers died of it; the third holds it until nothing else runs, and begins nothing beside it."""
    rig.submit("suspect", {"prompt": "x!", "max_tokens": 3, "ignore_eos": True})
    for _ in range(2):
        assert start_worker(rig.server, rig.prefix, lease_s=1.5, kill_token_id=33, wait=False).wait() == 70
    rig.add("before", {"prompt": "a", "max_tokens": 1500, "ignore_eos": True})
    worker = rig.worker(lease_s=1.5, step_time_s=0.03)
    rig.wait_tokens("before", 1)
    wait_until(lambda: len(worker.service.context.memory) == 2)  # the suspect is held
    rig.add("after", {"prompt": "b", "max_tokens": 5})
    time.sleep(0.3)
    assert rig.raw("after") == []
    assert len(rig.started("suspect")) == 2
    rig.client.set(rig.keys.cancel("before"), "1", px=86_400_000)
    rig.wait_done("suspect", "before", "after")
    ids = {name: [event.id for event in rig.events(name)] for name in ("before", "suspect", "after")}
    third = rig.started("suspect")[2]
    assert third.id[0] >= ids["before"][-1][0]
    first_token = next(event for event in rig.events("suspect") if isinstance(event, Tokens))
    assert ids["after"][0][0] >= first_token.id[0]
    order = [fields["request"] for _, event, fields in worker.log.lines if event == "started"]
    assert order == ["before", "suspect", "after"]


def test_names_of_crashed_workers_are_taken_off_the_queue(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    crashed = start_worker(rig.server, rig.prefix, lease_s=0.1)
    wait_until(lambda: rig.client.xinfo_consumers(rig.keys.jobs(), "workers"))
    crashed.kill()
    rig.client.xgroup_createconsumer(rig.keys.jobs("low"), "workers", "with-entries")
    rig.client.xadd(rig.keys.jobs("low"), {"id": "kept"})
    rig.client.xgroup_createconsumer(rig.keys.jobs("low"), "workers", "-")
    rig.client.xreadgroup("workers", "with-entries", {rig.keys.jobs("low"): ">"})
    live = rig.worker(lease_s=0.1, janitor_every_s=0.1, max_num_seqs=1)
    names = lambda key: {each["name"].decode() for each in rig.client.xinfo_consumers(key, "workers")}  # noqa: E731
    wait_until(lambda: names(rig.keys.jobs()) == {live.name}, 5)
    wait_until(lambda: "with-entries" not in names(rig.keys.jobs("low")), 5)  # not before its entry was recovered
    assert "-" in names(rig.keys.jobs("low"))
    rig.wait_empty()
    assert len(rig.dead()) == 1


def test_a_frozen_worker_is_kept_out_when_it_wakes(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    first = start_worker(rig.server, rig.prefix, step_time_s=0.02, lease_s=0.8)
    rig.add("my-1", {"prompt": "Hello", "seed": 5, "max_tokens": 60, "ignore_eos": True})
    rig.wait_tokens("my-1", 5)
    first.freeze()
    time.sleep(0.9)
    rig.worker(lease_s=0.8, step_time_s=0.02)
    wait_until(lambda: len(rig.started("my-1")) == 2)
    first.thaw()
    rig.wait_done("my-1")
    time.sleep(0.3)
    first.stop()
    assert first.wait() == 0
    assert len(rig.started("my-1")) == 2
    assert rig.num_tokens("my-1") == 60
    assert "lost the lease" in first.output() or "fenced" in first.output()


def test_a_worker_frozen_with_nobody_else_goes_on(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    first = start_worker(rig.server, rig.prefix, step_time_s=0.02, lease_s=0.6)
    rig.add("my-1", {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True})
    rig.wait_tokens("my-1", 5)
    first.freeze()
    time.sleep(1.0)
    first.thaw()
    rig.wait_done("my-1")
    assert len(rig.started("my-1")) == 1


def test_a_step_that_hangs_loses_its_requests(rig: Rig) -> None:
    """Beyond the watchdog the lease is not renewed; what the step gives at last is refused."""
    hang = {"s": 0.0}

    def script(sequence: Any) -> int:
        if hang["s"]:
            seconds, hang["s"] = hang["s"], 0.0
            time.sleep(seconds)
        return 97

    first = rig.worker(script=script, step_time_s=0.01, lease_s=0.9, watchdog_s=0.3)
    rig.add("my-1", {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True})
    rig.wait_tokens("my-1", 5)
    hang["s"] = 2.5
    second = rig.worker(script=[97] * 500, step_time_s=0.02, lease_s=0.9)
    wait_until(lambda: len(rig.started("my-1")) == 2, 4)
    assert rig.started("my-1")[1].worker == second.name
    wait_until(lambda: first.counters.lost_leases + first.counters.fenced >= 1, 5)
    rig.wait_done("my-1")
    assert len(rig.started("my-1")) == 2
    assert any(event == "the step loop makes no progress: leases are not renewed" for _, event, _ in first.log.lines)


def test_a_renewal_does_not_take_a_job_back(rig: Rig) -> None:
    """The entry was claimed by another; the first worker's next renewal shows that, and changes nothing."""
    worker = rig.worker(lease_s=0.9, step_time_s=0.02)
    entry_id = rig.add("my-1", {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True})
    rig.wait_tokens("my-1", 3)
    rig.client.xclaim(rig.keys.jobs(), "workers", "somebody", 0, [entry_id])
    wait_until(lambda: worker.counters.lost_leases == 1)
    assert not worker.engine.has_work
    count = len(rig.raw("my-1"))
    time.sleep(0.2)
    assert len(rig.raw("my-1")) == count
    assert rig.pending()[0]["consumer"] == b"somebody"
    rig.wait_done("my-1")  # when that one's lease is over it is recovered
    assert worker.counters.recovered == 1


def test_renewals_and_readings_charge_nothing(rig: Rig) -> None:
    """I10: a slow first token, many renewals, and replies lost on the way: still the first attempt."""
    runner = ScriptedRunner(num_blocks=512, max_model_len=2048, step_time_s=0.3)
    worker = rig.worker(runner=runner, lease_s=0.3, watchdog_s=5.0)
    rig.add("my-1", {"prompt": "x" * 1500, "max_tokens": 2, "ignore_eos": True})
    rig.wait_done("my-1")
    assert worker.service.context.leases.rounds >= 5
    assert len(rig.started("my-1")) == 1
    assert rig.dead() == []


def test_a_prefill_longer_than_the_streams_first_lifetime(rig: Rig) -> None:
    """`started` on no stream lives for two leases; if the first token takes longer, the attempt is written again."""
    runner = ScriptedRunner(num_blocks=512, max_model_len=4096, step_time_s=0.25)
    rig.worker(runner=runner, lease_s=0.6)
    rig.add("my-1", {"prompt": "x" * 3500, "max_tokens": 2, "ignore_eos": True})
    wait_until(lambda: rig.started("my-1"))
    first = rig.raw("my-1")[0]
    wait_until(lambda: not rig.raw("my-1"), 3)
    rig.wait_done("my-1")
    assert rig.raw("my-1")[0] == first


def test_of_several_workers_that_find_an_abandoned_job_one_gets_it(rig: Rig) -> None:
    for number in range(12):
        abandon(rig, f"my-{number}")
    workers = [rig.worker(lease_s=5.0, block_s=0.05, max_num_seqs=2) for _ in range(4)]
    rig.wait_done(*rig.submitted)
    assert all(len(rig.started(each)) == 1 for each in rig.submitted)
    assert sum(worker.counters.attempts for worker in workers) == 12
    assert sum(worker.counters.recovered for worker in workers) == 12
