"""The pool that renders and tokenises."""

from __future__ import annotations

import threading
import time

from headrace.worker.prepare import Prepared, PreparePool, PrepareTimeoutError
from tests.support.worker_process import wait_until


def collect(pool: PreparePool[int], count: int) -> list[Prepared[int]]:
    results: list[Prepared[int]] = []

    def enough() -> bool:
        results.extend(pool.done())
        return len(results) >= count

    wait_until(enough, 5)
    return results


def test_results_come_out_under_their_tickets_and_wake() -> None:
    woken = threading.Event()
    pool = PreparePool[int](2, 5.0, woken.set)
    tickets = [object() for _ in range(10)]
    for number, ticket in enumerate(tickets):
        pool.submit(ticket, lambda value=number: value)
    results = collect(pool, 10)
    assert {id(each.ticket): each.value for each in results} == {id(each): n for n, each in enumerate(tickets)}
    assert woken.is_set()
    assert len(pool) == 0
    pool.close()


def test_an_error_is_the_tickets_own() -> None:
    pool = PreparePool[int](1, 5.0, lambda: None)
    pool.submit("bad", lambda: 1 // 0)
    pool.submit("good", lambda: 1)
    results = {each.ticket: each for each in collect(pool, 2)}
    assert isinstance(results["bad"].error, ZeroDivisionError)
    assert results["good"].value == 1
    pool.close()


def test_work_that_takes_too_long_is_given_up_and_others_go_on() -> None:
    release = threading.Event()
    pool = PreparePool[int](1, 0.1, lambda: None)
    pool.submit("slow", lambda: int(release.wait(5)))
    time.sleep(0.02)
    pool.submit("next", lambda: 2)
    results = {each.ticket: each for each in collect(pool, 2)}
    assert isinstance(results["slow"].error, PrepareTimeoutError)
    assert results["next"].value == 2
    release.set()
    time.sleep(0.05)
    assert pool.done() == []  # the late result is dropped
    pool.close()


def test_when_all_hang_nothing_waits_for_ever_and_when_they_are_done_it_goes_on() -> None:
    release = threading.Event()
    pool = PreparePool[int](1, 0.05, lambda: None)
    for number in range(20):
        pool.submit(number, lambda: int(release.wait(5)))
    results = collect(pool, 20)
    assert all(isinstance(each.error, PrepareTimeoutError) for each in results)
    release.set()
    wait_until(lambda: pool._num_hung == 0)
    pool.submit("after", lambda: 7)
    assert [each.value for each in collect(pool, 1)] == [7]
    pool.close()


def test_waiting_in_line_is_no_overtime() -> None:
    pool = PreparePool[int](1, 0.3, lambda: None)
    for number in range(4):
        pool.submit(number, lambda value=number: time.sleep(0.15) or value)
    assert sorted(each.value for each in collect(pool, 4) if each.error is None) == [0, 1, 2, 3]  # type: ignore[type-var]
    pool.close()
