"""Over TLS with client certificates: everything that goes over plain connections, and what is said when TLS fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from headrace.clients import AsyncClient, Client, ServerError
from headrace.clients.keys import Keys
from headrace.worker.errors import ServerUnavailableError, StartupError
from headrace.worker.links import open_link
from tests.support.cluster import start_cluster
from tests.support.command import Outcome
from tests.support.rig import Rig
from tests.support.sentinel import start_sentinels
from tests.support.server import Server, free_port
from tests.support.server_kinds import installed_redis
from tests.support.tls import Certificates, TlsServer, needs_tls, start_tls_server
from tests.support.worker_process import wait_until

# The same tests as over plain connections: the fixture `rig` of this file is what they run on.
from tests.worker.test_cancel import test_a_running_request_is_cancelled_within_two_steps  # noqa: F401
from tests.worker.test_drain import test_after_the_limit_the_rest_is_handed_over_within_a_second  # noqa: F401
from tests.worker.test_end_to_end import (  # noqa: F401
    test_a_bare_job_is_answered_in_its_own_encoding,
    test_a_burst_ends_when_nothing_is_left,
    test_a_finished_job_is_acknowledged_and_deleted,
    test_high_goes_before_normal_before_low,
    test_logprobs_and_prompt_logprobs,
    test_several_choices_have_a_finished_each_and_one_terminal_entry,
    test_the_order_of_a_client_librarys_entries,
    test_the_workers_hash_tells_what_it_does_and_goes_with_it,
)
from tests.worker.test_recovery import test_many_jobs_killed_after_their_first_token  # noqa: F401

pytestmark = needs_tls()

JOB = {"prompt": "Hello", "max_tokens": 20, "seed": 3, "ignore_eos": True}
TOKENS = {"max_tokens": 60, "ignore_eos": True}
KEYS = Keys("headrace", "default")


@pytest.fixture
def rig(tls_server: TlsServer, prefix: str) -> Iterator[Rig]:
    made = Rig(tls_server, prefix, tls_server.client())  # type: ignore[arg-type]
    yield made
    made.close()


async def test_clients_and_the_command(tls_server: TlsServer, rig: Rig, call: Callable[..., Outcome]) -> None:
    rig.worker(script="echo")
    with Client(tls_server.url, prefix=rig.prefix) as client:
        assert client.submit("Hello").result(timeout_s=5).choices[0].text == "Hello"
    async with AsyncClient(tls_server.url, prefix=rig.prefix) as client:
        handle = await client.submit("World")
        assert (await handle.result(timeout_s=5)).choices[0].text == "World"
    files = tls_server.certificates
    place = ["--redis-url", f"rediss://127.0.0.1:{tls_server.port}", "--prefix", rig.prefix]
    place += ["--redis-tls-ca", files["ca.crt"], "--redis-tls-cert", files["client.crt"]]
    place += ["--redis-tls-key", files["client.key"]]
    assert call("submit", "Hello", *place) == Outcome(0, "Hello\n", "")
    assert "running" in call("status", *place).out


def test_replies_of_many_records_and_pipelines_of_many_megabytes(rig: Rig) -> None:
    """What the TLS library has read already is not waited for: a record holds 16 KiB, a reply here megabytes."""
    rig.worker(max_payload_bytes=1 << 23, max_num_seqs=64)
    wait_until(lambda: rig.client.exists(rig.keys.worker(rig.workers[0].name)))
    with rig.client.pipeline(transaction=True) as pipeline:
        for number, stream in enumerate(rig.keys.all_jobs):
            payload = b'{"prompt": "' + b"y" * 1_500_000 + b'", "max_tokens": 1}'
            pipeline.xadd(stream, {"id": f"large-{number}", "json": payload})
            rig.submitted.append(f"large-{number}")
        pipeline.execute()
    for number in range(40):  # their entries are written in one pipeline
        rig.add(f"wide-{number}", {**JOB, "max_tokens": 40, "metadata": {"padding": "x" * 15_000}})
    rig.wait_done(*rig.submitted, timeout_s=20)
    assert all(rig.num_tokens(f"wide-{number}") == 40 for number in range(40))
    assert rig.workers[0].counters.reconnects == 0


def test_a_connection_lost(rig: Rig) -> None:
    rig.worker(step_time_s=0.01)
    rig.add("my-1", {**JOB, "max_tokens": 100})
    for number in (5, 30):
        rig.wait_tokens("my-1", number)
        rig.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    rig.wait_done("my-1")
    assert rig.num_tokens("my-1") == 100


async def test_behind_sentinels(certificates: Certificates, tmp_path: Path, prefix: str) -> None:
    """Servers, replication and sentinels all by TLS."""
    group = start_sentinels(tmp_path, binary=installed_redis(), certificates=certificates)
    try:
        group.wait_synced()
        url = f"{group.url.replace('redis+', 'rediss+')}?{certificates.options()}"
        rig = Rig(group, prefix, group.client())  # type: ignore[arg-type]
        rig.worker(url=url, step_time_s=0.02)
        with Client(url, prefix=prefix) as client, client.submit("Hello", id="my-1", **TOKENS).stream() as stream:
            events = [next(stream) for _ in range(5)]
            old = group.master
            old.kill()
            events += list(stream)
        assert sum(len(getattr(event, "token_ids", ())) for event in events) == 60
        async with AsyncClient(url, prefix=prefix) as client:
            assert len((await (await client.submit("x", **TOKENS)).result()).choices[0].token_ids) == 60
        rig.client = group.client()
        rig.close()
    finally:
        group.stop()


async def test_in_a_cluster(certificates: Certificates, tmp_path: Path) -> None:
    cluster = start_cluster(tmp_path, certificates=certificates)
    try:
        url = f"{cluster.whole_tls_url}?{certificates.options()}"
        rig = Rig(cluster, "own", cluster.client())  # type: ignore[arg-type]
        rig.worker(url=url, script="echo")
        with Client(url, prefix="own") as client:
            for number in range(4):
                assert client.submit(f"text {number}").result(timeout_s=5).choices[0].text == f"text {number}"
        by_one = f"rediss://127.0.0.1:{cluster.tls_ports[0]}?{certificates.options()}"
        async with AsyncClient(by_one, prefix="own") as client:
            for number in range(4):
                handle = await client.submit(f"text {number}")
                assert (await handle.result(timeout_s=5)).choices[0].text == f"text {number}"
        rig.close()
    finally:
        for node in cluster.nodes:
            node.stop()


# --- what is said when it fails ---------------------------------------------------------------------------------------


def failures(url: str, call: Callable[..., Outcome]) -> list[str]:
    """What worker, client and command say."""
    with pytest.raises(ServerUnavailableError) as of_worker:
        open_link(url, 5.0, "test", KEYS)
    with Client(url) as client, pytest.raises(ServerError) as of_client:
        client.submit("Hello")
    refused = call("status", "--redis-url", url)
    assert refused.code == 3
    return [str(of_worker.value), str(of_client.value), refused.line]


@pytest.mark.parametrize(
    ("shown", "options", "words"),
    [
        ("server", {"ca": "", "client": "client"}, "signed by no CA that is trusted here"),
        ("server", {"ca": "other-ca"}, "signed by no CA that is trusted here"),
        ("elsewhere", {}, "is for another name: IP address mismatch"),
        ("expired", {}, "the server's certificate has expired"),
    ],
)
def test_a_certificate_that_does_not_do(
    certificates: Certificates, tmp_path: Path, call: Callable[..., Outcome], shown: str, options: dict[str, str],
    words: str,
) -> None:  # fmt: skip
    server = start_tls_server(tmp_path, certificates, name=shown)
    try:
        url = f"rediss://127.0.0.1:{server.port}/0?{certificates.options(**options)}"
        assert all(words in each for each in failures(url, call)), failures(url, call)
        if shown == "elsewhere":
            open_link(f"{url}&ssl_check_hostname=no", 5.0, "test", KEYS).close()
    finally:
        server.stop()


@pytest.mark.parametrize("client", ["", "foreign"])
def test_a_client_certificate_that_is_missing_or_not_trusted(
    tls_server: TlsServer, certificates: Certificates, client: str
) -> None:
    """The server ends the connection, and its reason arrives only if it is read before the end is seen."""
    url = f"rediss://127.0.0.1:{tls_server.port}/0?{certificates.options(client=client)}"
    with pytest.raises(ServerUnavailableError, match=r"client certificate|reset|closed|Broken pipe"):
        open_link(url, 5.0, "test", KEYS)


def test_a_server_without_tls(own_server: Callable[..., Server], certificates: Certificates) -> None:
    url = f"rediss://127.0.0.1:{own_server().port}/0?{certificates.options()}"
    with pytest.raises(ServerUnavailableError, match=r"without TLS|does not speak TLS"):
        open_link(url, 0.5, "test", KEYS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("ssl_ca_certs=/nowhere", "ssl_ca_certs /nowhere: No such file"),
        ("ssl_ca_certs={client.key}", "holds no certificate"),
        ("ssl_certfile={client.crt}&ssl_keyfile={server.key}", "key values mismatch"),
        ("ssl_certfile={client.crt}&ssl_keyfile={locked.key}", "ssl_keyfile"),
        ("ssl_certfile={client.crt}&ssl_keyfile={locked.key}&ssl_password=wrong", "ssl_keyfile"),
        ("ssl_certfile={client.crt}", "client.crt, without ssl_keyfile: "),
        ("ssl_keyfile={client.key}", "ssl_keyfile needs ssl_certfile"),
    ],
)
def test_files_that_do_not_do(
    certificates: Certificates, call: Callable[..., Outcome], options: str, words: str
) -> None:
    """Said at once, before anything connects; a key with a password is not asked for on the terminal."""
    for name in ("client.key", "client.crt", "server.key", "locked.key"):
        options = options.replace(f"{{{name}}}", quote(certificates[name], safe="/"))
    url = f"rediss://127.0.0.1:1/0?{options}"
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=words):
            kind(url)
    with pytest.raises(StartupError, match=words):
        open_link(url, 5.0, "test", KEYS)
    refused = call("status", "--redis-url", url)
    assert refused.code == 2
    assert words in refused.line


def test_the_command_names_its_flags(tls_server: TlsServer, call: Callable[..., Outcome]) -> None:
    refused = call("status", "--redis-url", f"rediss://127.0.0.1:{tls_server.port}")
    assert refused.line.endswith("name its CA's file with --redis-tls-ca")
    plain = call("status", "--redis-url", f"redis://127.0.0.1:{tls_server.port}")
    assert plain.code == 3
    assert plain.line.endswith("the port may be one with TLS, which rediss is for")


def test_a_key_with_a_password(tls_server: TlsServer, certificates: Certificates) -> None:
    options = certificates.options().replace("client.key", "locked.key")
    url = f"rediss://127.0.0.1:{tls_server.port}/0?{options}&ssl_password=hush"
    open_link(url, 5.0, "test", KEYS).close()


def test_flags_and_options_are_not_mixed(certificates: Certificates, call: Callable[..., Outcome]) -> None:
    ca = certificates["ca.crt"]
    both = call("status", "--redis-url", f"rediss://h?ssl_ca_certs={ca}", "--redis-tls-ca", ca)
    assert (both.code, both.line) == (
        2,
        "headrace status: --redis-tls-ca and ssl_ca_certs in --redis-url: give one of them",
    )
    without = call("status", "--redis-url", "redis://h", "--redis-tls-ca", ca)
    assert (without.code, without.line) == (2, "headrace status: --redis-tls-ca is for rediss addresses")
    missing = call("status", "--redis-url", "rediss://h", "--redis-tls-ca", f"{free_port()}")
    assert "--redis-tls-ca" in missing.line
    assert "No such file" in missing.line
