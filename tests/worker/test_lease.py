"""The table of leases, and the scripts that renew, fetch, acknowledge and hand back only what is one's own."""

from __future__ import annotations

import time

import pytest

from headrace.clients.events import JobRef
from headrace.worker import lua
from headrace.worker.lease import Leases
from headrace.worker.options import WorkerSettings
from tests.support.rig import Rig

REF = JobRef("p:{q}:jobs", "5-0")


@pytest.fixture
def leases() -> Leases:
    return Leases(WorkerSettings(lease_s=30.0, watchdog_s=10.0))


def test_publishing_stops_when_a_renewal_was_missed_and_beginning_with_the_lease(leases: Leases) -> None:
    lease = leases.hold(REF, 100.0)
    assert leases.may_publish(lease, 114.9)
    assert not leases.may_publish(lease, 115.0)
    assert leases.may_begin(lease, 129.9)
    assert not leases.may_begin(lease, 130.0)


def test_a_renewal_counts_from_when_it_was_sent(leases: Leases) -> None:
    lease = leases.hold(REF, 100.0)
    leases.renewed([REF], [True], 110.0)
    assert (lease.since_s, lease.renewals) == (110.0, 1)
    assert leases.may_publish(lease, 124.9)


def test_what_a_renewal_shows_to_be_anothers_is_lost(leases: Leases) -> None:
    lease = leases.hold(REF, 100.0)
    leases.renewed([REF], [False], 110.0)
    assert lease.lost
    assert not leases.may_publish(lease, 110.1)
    assert not leases.may_begin(lease, 110.1)


def test_a_renewal_that_was_under_way_says_nothing_of_an_entry_taken_anew(leases: Leases) -> None:
    leases.hold(REF, 100.0)
    leases.release(REF)
    again = leases.hold(REF, 112.0)
    leases.renewed([REF], [False], 110.0)
    assert not again.lost
    leases.release(REF)
    leases.renewed([REF], [True], 120.0)
    assert len(leases) == 0


def test_the_watchdog_looks_at_progress(leases: Leases) -> None:
    leases.progress()
    assert not leases.stalled(time.monotonic() + 9)
    assert leases.stalled(time.monotonic() + 11)


@pytest.fixture
def pending(rig: Rig) -> tuple[Rig, str]:
    """An entry pending for consumer "me"."""
    rig.client.xgroup_create(rig.keys.jobs(), "workers", "0", mkstream=True)
    entry_id = rig.client.xadd(rig.keys.jobs(), {"id": "my-1", "json": "{}"}).decode()
    rig.client.xreadgroup("workers", "me", {rig.keys.jobs(): ">"})
    for script in lua.ALL:
        rig.client.script_load(script.source)
    return rig, entry_id


def call(rig: Rig, script: object, keys: tuple[str, ...], *args: object) -> object:
    return rig.client.execute_command(*lua.call(script, keys, args))  # type: ignore[arg-type]


def owner(rig: Rig) -> tuple[str, int]:
    [entry] = rig.pending()
    return entry["consumer"].decode(), entry["times_delivered"]


def test_renew_touches_ones_own_only_and_counts_no_delivery(pending: tuple[Rig, str]) -> None:
    rig, entry_id = pending
    time.sleep(0.05)
    assert call(rig, lua.RENEW, (rig.keys.jobs(),), "other", entry_id) == [0]
    assert rig.pending()[0]["time_since_delivered"] >= 50
    assert owner(rig) == ("me", 1)
    assert call(rig, lua.RENEW, (rig.keys.jobs(),), "me", entry_id, "9-9") == [1, 0]
    assert rig.pending()[0]["time_since_delivered"] < 50
    assert owner(rig) == ("me", 1)


def test_renew_tells_that_an_entry_was_deleted_or_its_group_is_gone(pending: tuple[Rig, str]) -> None:
    rig, entry_id = pending
    rig.client.xdel(rig.keys.jobs(), entry_id)
    assert call(rig, lua.RENEW, (rig.keys.jobs(),), "me", entry_id) == [0]
    rig.client.xgroup_destroy(rig.keys.jobs(), "workers")
    assert call(rig, lua.RENEW, (rig.keys.jobs(),), "me", entry_id) == [0]


def test_acknowledge_is_the_owners_and_happens_once(pending: tuple[Rig, str]) -> None:
    rig, entry_id = pending
    keys = (rig.keys.jobs(), rig.keys.dead)
    assert call(rig, lua.ACKNOWLEDGE, keys, "other", entry_id, "reason", "x") == 0
    assert rig.num_jobs() == 1
    assert call(rig, lua.ACKNOWLEDGE, keys, "me", entry_id, "reason", "x") == 1
    assert call(rig, lua.ACKNOWLEDGE, keys, "me", entry_id, "reason", "x") == 0
    assert rig.num_jobs() == 0
    assert rig.dead() == [{b"id": b"my-1", b"json": b"{}", b"reason": b"x"}]


def test_acknowledge_of_a_dead_job_does_nothing_if_the_copy_fails(pending: tuple[Rig, str]) -> None:
    import redis

    rig, entry_id = pending
    rig.client.set(rig.keys.dead, "no stream")
    with pytest.raises(redis.ResponseError):
        call(rig, lua.ACKNOWLEDGE, (rig.keys.jobs(), rig.keys.dead), "me", entry_id, "reason", "x")
    assert rig.num_jobs() == 1
    assert owner(rig) == ("me", 1)
    rig.client.delete(rig.keys.dead)


def test_hand_back_gives_to_nobody_idle_above_any_lease(pending: tuple[Rig, str]) -> None:
    rig, entry_id = pending
    assert call(rig, lua.HAND_BACK, (rig.keys.jobs(),), "other", entry_id, 10**9) == 0
    assert owner(rig) == ("me", 1)
    assert call(rig, lua.HAND_BACK, (rig.keys.jobs(),), "me", entry_id, 10**9) == 1
    assert owner(rig) == ("-", 1)
    assert rig.pending()[0]["time_since_delivered"] >= 10**9


def test_fetch_gives_ones_own_entry(pending: tuple[Rig, str]) -> None:
    rig, entry_id = pending
    assert call(rig, lua.FETCH, (rig.keys.jobs(),), "other", entry_id) == [0]
    assert call(rig, lua.FETCH, (rig.keys.jobs(),), "me", entry_id) == [1, [b"id", b"my-1", b"json", b"{}"]]
    rig.client.xdel(rig.keys.jobs(), entry_id)
    assert call(rig, lua.FETCH, (rig.keys.jobs(),), "me", entry_id) == [1]
    rig.client.xack(rig.keys.jobs(), "workers", entry_id)


def test_leave_keeps_a_consumer_that_still_has_entries(pending: tuple[Rig, str]) -> None:
    rig, entry_id = pending
    rig.client.xgroup_create(rig.keys.jobs("low"), "workers", "0", mkstream=True)
    assert call(rig, lua.LEAVE, rig.keys.all_jobs, "me") == 1
    assert owner(rig) == ("me", 1)
    rig.client.xack(rig.keys.jobs(), "workers", entry_id)
    assert call(rig, lua.LEAVE, rig.keys.all_jobs, "me") == 0
    assert rig.client.xinfo_consumers(rig.keys.jobs(), "workers") == []


def test_take_reads_in_order_with_the_room_left_and_creates_nothing(rig: Rig) -> None:
    high, normal, low = rig.keys.all_jobs
    for script in lua.ALL:
        rig.client.script_load(script.source)
    for stream, count in ((normal, 3), (low, 3)):
        rig.client.xgroup_create(stream, "workers", "0", mkstream=True)
        for _ in range(count):
            rig.client.xadd(stream, {"id": "x"})
    reply = call(rig, lua.TAKE, rig.keys.all_jobs, "me", 4)
    assert isinstance(reply, list)
    assert reply[0][0] == 1
    assert reply[0][1].startswith(b"NOGROUP")
    assert [(index, len(entries)) for index, entries in reply[1:]] == [(2, 3), (3, 1)]
    assert not rig.client.exists(high)


def test_a_heartbeat_is_never_without_a_lifetime(rig: Rig) -> None:
    rig.client.script_load(lua.HEARTBEAT.source)
    key = rig.keys.worker("me")
    call(rig, lua.HEARTBEAT, (key,), 5000, "state", "running", "pid", 1)
    assert rig.client.hgetall(key) == {b"state": b"running", b"pid": b"1"}
    assert 0 < rig.client.pttl(key) <= 5000
