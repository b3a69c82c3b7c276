"""`headrace doctor` finds faults of a queue, each planted for real, and says nothing of anything else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from headrace.clients.keys import GROUP
from headrace.engine.types import ModelInfo
from headrace.worker.exit_codes import ExitCode
from tests.support.patient import Patient
from tests.support.rig import abandon
from tests.support.worker_process import WorkerProcess, is_done, wait_until

JOB = {"prompt": "Hello", "max_tokens": 20, "seed": 3, "ignore_eos": True}
LONG = {**JOB, "max_tokens": 400}
StartWorker = Callable[..., WorkerProcess]


class Hang:
    """A script for a worker's model: its steps stand still while `on` is set."""

    def __init__(self) -> None:
        self.on = threading.Event()
        self.over = threading.Event()

    def __call__(self, _: object) -> int:
        if self.on.is_set():
            self.over.wait(20)
        return 97


@pytest.fixture
def hang(patient: Patient) -> Iterator[Hang]:
    """Over before the patient's workers are stopped."""
    made = Hang()
    yield made
    made.over.set()


def test_nothing_is_found_on_a_healthy_queue(patient: Patient, start_worker: StartWorker) -> None:
    """A real worker, jobs of all lines served, cancelled, refused and running."""
    start_worker(patient.server, patient.prefix, step_time_s=0.005)
    for number, priority in enumerate(("high", "normal", "low") * 4):
        patient.add(f"done-{number}", {**JOB, "stream": number % 2 == 0}, priority=priority)
    patient.submit("refused", {**JOB, "max_tokens": 0})
    patient.submit("submitted", JOB)
    patient.add("cancelled", LONG)
    patient.client.set(patient.keys.cancel("cancelled"), "1", px=60_000)
    patient.wait_done(*patient.submitted)
    patient.wait_empty()
    patient.add("running", LONG)
    patient.wait_tokens("running", 1)
    diagnosis = patient.examine()
    assert (diagnosis.code, diagnosis.document["findings"], diagnosis.document["not_looked_at"]) == (0, [], [])
    memory = {row["kind"]: row for row in diagnosis.document["memory"]}
    assert (memory["request streams"]["keys"], memory["jobs"]["keys"], memory["workers"]["keys"]) == (16, 3, 1)
    assert memory["request streams"]["bytes"] > 16 * 200
    [line] = [each for each in diagnosis.document["queue"]["lines"] if each["priority"] == "normal"]
    assert (line["waiting"], line["taken"]) == (0, 1)
    text = patient.call("doctor", *patient.place)
    assert (text.code, text.err) == (0, "")
    assert "nothing found" in text.out and "1 running" in text.out and "\x1b" not in text.out


# --- workers ----------------------------------------------------------------------------------------------------------


def test_a_queue_without_workers(patient: Patient) -> None:
    nobody = patient.examine()
    assert (nobody.code, nobody.checks) == (ExitCode.WARNINGS_FOUND, {"no-worker"})
    patient.add("one", JOB)
    patient.add("two", JOB, priority="low")
    waiting = patient.examine()
    assert (waiting.code, waiting.checks) == (ExitCode.ERRORS_FOUND, {"no-worker"})
    assert "2 jobs wait" in waiting.about("no-worker")["seen"]
    elsewhere = patient.examine("--queue", "defualt")
    assert "there are others: default" in elsewhere.about("no-worker")["seen"]


def test_workers_that_all_drain(patient: Patient) -> None:
    worker = patient.worker(lease_s=1.0, step_time_s=0.02)
    patient.add("running", LONG)
    patient.wait_tokens("running", 1)
    worker.control.request_stop()
    name = patient.keys.worker(worker.name)
    wait_until(lambda: patient.client.hget(name, "state") == b"draining")
    patient.add("late", JOB)
    diagnosis = patient.examine()
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.ERRORS_FOUND, {"no-taker"})
    assert f"{worker.name} is draining" in diagnosis.about("no-taker")["seen"]


def test_a_worker_whose_steps_stand_still(patient: Patient, hang: Hang) -> None:
    patient.worker(script=hang, lease_s=1.0, watchdog_s=0.3)
    hang.on.set()
    patient.add("one", JOB)
    wait_until(lambda: patient.examine().checks == {"stuck-worker"})
    diagnosis = patient.examine()
    assert diagnosis.code == ExitCode.ERRORS_FOUND
    assert "has 1 job" in diagnosis.about("stuck-worker")["seen"]


def test_a_frozen_worker_beside_waiting_jobs(patient: Patient, start_worker: StartWorker) -> None:
    worker = start_worker(patient.server, patient.prefix)
    wait_until(lambda: patient.examine().checks == set())
    worker.freeze()
    # Its last blocking read would still be given the job.
    wait_until(lambda: not patient.client.info("clients")["blocked_clients"])
    patient.add_aged("one", 25.0)
    diagnosis = patient.examine()
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.WARNINGS_FOUND, {"idle-worker"})
    seen = diagnosis.about("idle-worker")["seen"]
    assert f"pid {worker.pid} on" in seen and "1 job wait" in seen


def test_a_killed_worker(patient: Patient, start_worker: StartWorker) -> None:
    worker = start_worker(patient.server, patient.prefix, lease_s=1.0, step_time_s=0.05)
    patient.add("one", LONG)
    patient.wait_tokens("one", 1)
    worker.kill()
    wait_until(lambda: not list(patient.client.scan_iter(patient.keys.worker_pattern)))
    diagnosis = patient.examine()
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.ERRORS_FOUND, {"dead-consumer", "no-worker"})
    assert "has 1 job" in diagnosis.about("dead-consumer")["seen"]
    wait_until(lambda: "abandoned" in patient.examine("--lease", "1s").checks)


def test_a_name_that_a_crash_left(patient: Patient) -> None:
    patient.worker()
    wait_until(lambda: patient.examine().checks == set())
    for name in ("crashed", b"no \xff worker \x1b[2J"):
        patient.client.execute_command("XGROUP", "CREATECONSUMER", patient.keys.jobs(), GROUP, name)
    outcome = patient.call("doctor", *patient.place)
    assert outcome.code == ExitCode.WARNINGS_FOUND
    assert outcome.out.count("dead-consumer") == 2
    assert "worker crashed gives no sign of life; it has 0 jobs" in outcome.out
    assert "\x1b" not in outcome.out


def test_different_models_on_one_queue(patient: Patient) -> None:
    names = [patient.worker(model=ModelInfo("scripted", letter * 64)).name for letter in "ab"]
    wait_until(lambda: patient.examine().checks == {"models"})
    diagnosis = patient.examine()
    assert diagnosis.code == ExitCode.WARNINGS_FOUND
    assert all(name in diagnosis.about("models")["seen"] for name in names)


def test_different_leases_on_one_queue(patient: Patient) -> None:
    patient.worker(lease_s=20.0)
    patient.worker(lease_s=15.0)
    wait_until(lambda: patient.examine().checks == {"leases"})
    assert "15, 20 s" in patient.examine().about("leases")["seen"]


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_jobs_that_nobody_takes_over(patient: Patient, hang: Hang) -> None:
    abandon(patient, "one")
    alone = patient.examine()
    assert (alone.code, alone.checks) == (ExitCode.ERRORS_FOUND, {"abandoned", "dead-consumer", "no-worker"})
    assert "1 job taken by dead-worker was not renewed" in alone.about("abandoned")["seen"]
    patient.worker(script=hang)
    patient.wait_done("one")
    hang.on.set()
    patient.add("two", JOB)
    wait_until(lambda: len(patient.pending()) == 1)
    abandon(patient, "three")
    beside = patient.examine()
    assert (beside.code, beside.checks) == (ExitCode.WARNINGS_FOUND, {"abandoned", "dead-consumer"})
    assert "1 job taken by dead-worker" in beside.about("abandoned")["seen"]


def test_jobs_handed_back_with_nobody_there(patient: Patient) -> None:
    worker = patient.worker(step_time_s=0.02, drain_timeout_s=0.0)
    patient.add("one", LONG)
    patient.wait_tokens("one", 1)
    worker.stop()
    diagnosis = patient.examine()
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.ERRORS_FOUND, {"abandoned", "no-worker"})
    assert "1 job taken by nobody" in diagnosis.about("abandoned")["seen"]


def test_dead_letters(patient: Patient) -> None:
    patient.worker()
    patient.add("bad", "{")
    patient.wait_done("bad")
    wait_until(lambda: patient.examine().checks == {"dead-letters"})
    assert patient.examine().code == ExitCode.WARNINGS_FOUND


@pytest.mark.parametrize(("age_s", "severity"), [(20 * 3600.0, "warning"), (23.5 * 3600.0, "error")])
def test_jobs_that_are_nearly_too_old(patient: Patient, age_s: float, severity: str) -> None:
    patient.add_aged("one", age_s)
    diagnosis = patient.examine()
    assert diagnosis.checks == {"old-job", "no-worker"}
    assert diagnosis.about("old-job")["severity"] == severity
    assert "old-job" not in patient.examine("--queue-ttl", "2d").checks


def test_entries_from_the_future(patient: Patient) -> None:
    patient.worker()
    patient.add_aged("one", -3600.0)
    patient.wait_done("one")
    patient.wait_empty()
    diagnosis = patient.examine()
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.WARNINGS_FOUND, {"ids-ahead"})
    assert "60 min ahead" in diagnosis.about("ids-ahead")["seen"]


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_that_stay_for_ever(patient: Patient) -> None:
    patient.worker()
    for number in range(4):
        patient.add(f"one-{number}", JOB)
    patient.wait_done(*patient.submitted)
    patient.wait_empty()
    assert patient.examine().checks == set()
    patient.client.persist(patient.keys.out("one-2"))
    patient.client.set(f"{patient.prefix}:mine", "x")
    diagnosis = patient.examine()
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.WARNINGS_FOUND, {"no-ttl"})
    seen = {each["seen"] for each in diagnosis.document["findings"]}
    assert seen == {
        f"1 of 4 keys of kind request streams stay for ever: {patient.keys.out('one-2')}",
        f"1 of 1 keys of kind others stay for ever: {patient.prefix}:mine",
    }
    assert is_done(patient.client, patient.keys.out("one-2"))


@pytest.mark.parametrize("which", ["jobs", "dead"])
def test_a_key_of_another_type(patient: Patient, which: str) -> None:
    name = patient.keys.dead if which == "dead" else patient.keys.jobs("low")
    patient.client.set(name, "x")
    diagnosis = patient.examine()
    assert (diagnosis.code, diagnosis.checks) == (ExitCode.ERRORS_FOUND, {"key-type"})
    assert f"{name} is a string" in diagnosis.about("key-type")["seen"]
