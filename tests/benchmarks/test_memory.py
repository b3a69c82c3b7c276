"""What measures a server's memory and a million jobs, made small; and that the streams measured are as real ones."""

from __future__ import annotations

import pytest

from benchmarks import memory, million
from benchmarks.memory import READER, Thing, events, measure, stream, things, used_bytes
from benchmarks.rig import connect
from benchmarks.settings import Settings
from headrace.clients.keys import Keys
from tests.support.rig import Rig
from tests.support.server import Server

KIB = 1024


def test_every_thing_is_measured_on_a_server(tmp_path) -> None:
    section = memory.section(Settings(tmp_path, quick=True), lambda _: None)
    each, fitted = section.tables
    found = {str(row[0]): row[1:] for row in each.rows}
    assert list(found) == [*(thing.name for thing in things()), READER]
    assert all(1 * KIB < value < 64 * KIB for value in found[READER])
    for size in memory.PAYLOADS:
        assert all(size < value < 1.5 * size + 200 for value in found[f"job, waiting, payload of {size:,} B"])
    default, small = found["stream, queued only"]
    assert 4 * KIB < default < 5 * KIB and small < KIB
    for per_job, taken, least, per_token, joined in (row[1:] for row in fitted.rows):
        assert 0 < per_job < 400 and 0 < taken < 500
        assert least > 500 and 30 < per_token < 70 and 5 < joined < per_token


def test_the_streams_measured_are_as_a_workers(own_server) -> None:
    """What a worker writes is entry by entry what is measured, but for its texts, and takes as much."""
    rig = Rig(server := own_server(), "own", server.client())
    worker = rig.worker()
    for number in range(30):
        rig.submit(f"served-{number}", {"prompt": "Hello", "max_tokens": 300, "ignore_eos": True})
    rig.wait_done(*rig.submitted)
    rig.wait_empty()
    told = rig.events("served-0")
    assert [type(each) for each in told] == [type(each) for each in events(300, ended=True)]
    rig.check()
    worker.stop()
    before = used_bytes(rig.client)
    rig.client.delete(*map(rig.keys.out, rig.submitted))
    real = (before - used_bytes(rig.client)) / len(rig.submitted)
    with connect(server.url) as client:
        # the least of three: a connection's buffer that grows meanwhile is counted too
        mine = min(measure(client, Thing("it", lambda i: stream(i, told, "json"), 300), 30) for _ in range(3))
    assert mine == pytest.approx(real, rel=0.05)
    rig.client.close()


@pytest.mark.parametrize("way", ["raw", "client"])
def test_a_queue_is_filled_and_looked_at(own_server, way: str) -> None:
    server: Server = own_server()
    run = million.measure(server.url, server.pid, way, 500)
    assert (run.way, run.jobs) == (way, 500)
    assert run.server.startswith("Valkey")
    assert 500 * 100 < run.used_bytes < 500 * 8 * KIB
    assert run.filled.wall_s > 0 and run.status.wall_s > 0 and run.doctor.longest_us > 0
    client = server.client()
    assert client.xlen(Keys().jobs()) == 500
    assert client.xpending(Keys().jobs(), "workers")["pending"] == 500  # what the takes have taken
