"""What a worker does not start with: one clear sentence, and what to do."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from headrace.worker.errors import ServerUnavailableError, ServerUnsuitableError
from headrace.worker.options import WorkerSettings
from headrace.worker.server_check import check_info
from tests.support.rig import Rig
from tests.support.server import Server
from tests.support.worker_process import WorkerProcess


def test_nobody_answers(rig: Rig) -> None:
    with pytest.raises(ServerUnavailableError, match=r"no server at redis://127\.0\.0\.1:1/0"):
        rig.worker(url="redis://127.0.0.1:1/0")


def test_a_password_is_wanted(own_server: Callable[..., Server], rig: Rig) -> None:
    server = own_server()
    server.client().config_set("requirepass", "geheim")
    with pytest.raises(ServerUnavailableError) as caught:
        rig.worker(url=f"redis://:wrong@127.0.0.1:{server.port}/0")
    assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
    worker = rig.worker(url=f"redis://:geheim@127.0.0.1:{server.port}/0")
    assert worker.stop() == 0


def test_a_server_that_evicts(own_server: Callable[..., Server], rig: Rig) -> None:
    server = own_server("--maxmemory-policy", "allkeys-lru")
    with pytest.raises(ServerUnsuitableError, match="CONFIG SET maxmemory-policy noeviction"):
        rig.worker(url=server.url)
    server.client().config_set("maxmemory-policy", "noeviction")
    assert rig.worker(url=server.url).stop() == 0


def test_a_replica(own_server: Callable[..., Server], rig: Rig) -> None:
    master = own_server()
    replica = own_server("--replicaof", "127.0.0.1", str(master.port))
    with pytest.raises(ServerUnavailableError, match="is a replica and takes no writes: give the master's address"):
        rig.worker(url=replica.url)
    replica.client().replicaof("no", "one")
    assert rig.worker(url=replica.url).stop() == 0


@pytest.mark.parametrize(
    ("info", "suits"),
    [
        ({"redis_version": "7.0.0"}, True),
        ({"redis_version": "8.2.1"}, True),
        ({"redis_version": "6.2.14"}, False),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.5"}, True),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.0"}, True),
        ({"redis_version": "7.2.4", "valkey_version": "7.1.0"}, False),
        ({"redis_version": "10.0.0"}, True),
        ({}, False),
        ({"redis_version": "7.2.0", "maxmemory_policy": "noeviction"}, True),
        ({"redis_version": "7.2.0", "maxmemory_policy": "volatile-ttl"}, False),
    ],
)
def test_what_a_server_must_be(info: dict[str, str], suits: bool) -> None:
    if suits:
        check_info(info)
    else:
        with pytest.raises(ServerUnsuitableError):
            check_info(info)


@pytest.mark.parametrize(
    "settings",
    [
        {"lease_s": 0}, {"queue_ttl_s": 3600.0}, {"max_attempts": 0}, {"block_s": 1.5}, {"drain_timeout_s": -1.0},
        {"take_limit": 0}, {"watchdog_s": 0.0},
    ],
)  # fmt: skip
def test_settings_that_could_not_take_effect_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        WorkerSettings(**settings)  # type: ignore[arg-type]


def test_a_worker_waits_for_streams_that_nobody_has_made(start_worker: Callable[..., WorkerProcess], rig: Rig) -> None:
    worker = start_worker(rig.server, rig.prefix)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.3)
    rig.add("my-1", {"prompt": "x", "max_tokens": 1})
    rig.wait_done("my-1")


def test_an_address_may_carry_options_of_a_client(rig: Rig) -> None:
    rig.worker(url=rig.server.url + "?decode_responses=True&protocol=3&retry_on_timeout=yes&max_connections=5")
    rig.add("my-1", {"prompt": "x", "max_tokens": 1})
    rig.wait_done("my-1")
