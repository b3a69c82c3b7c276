"""Servers by their socket, in another database, by users and passwords of odd characters, by passwords in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

from headrace.clients import AsyncClient, Client, Policy, UnavailableError
from headrace.worker.errors import ServerUnavailableError
from tests.support.command import Outcome
from tests.support.rig import Rig, ThreadWorker
from tests.support.server import Server, binaries
from tests.support.worker_process import wait_until

JOB = {"prompt": "Hello", "max_tokens": 20, "seed": 3, "ignore_eos": True}
# An ACL takes no spaces in a user's name, and > at the beginning of a password's word.
USER, PASSWORD = "ü@:/%?#[]&=+x", "p@ss/wörd:%20 ?#[&=+>"


async def whole_round(url: str, prefix: str, call: Callable[..., Outcome]) -> None:
    """Both clients, and the command."""
    with Client(url, prefix=prefix) as client:
        assert client.submit("one").result(timeout_s=5).choices[0].text == "one"
    async with AsyncClient(url, prefix=prefix) as client:
        assert (await (await client.submit("two")).result(timeout_s=5)).choices[0].text == "two"
    place = ["--redis-url", url, "--prefix", prefix]
    assert call("submit", "three", *place) == Outcome(0, "three\n", "")
    assert "running" in call("status", *place).out


@pytest.fixture
def rig_by() -> Iterator[Callable[[Server, redis.Redis], Rig]]:
    made: list[Rig] = []

    def make(server: Server, client: redis.Redis) -> Rig:
        made.append(Rig(server, f"own{len(made)}", client))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("binary", binaries())
async def test_by_its_socket(
    own_server: Callable[..., Server],
    rig_by: Callable[..., Rig],
    call: Callable[..., Outcome],
    tmp_path: Path,
    binary: Path | None,
) -> None:
    socket = tmp_path / "a b" / "redis.sock"
    socket.parent.mkdir()
    server = own_server("--unixsocket", str(socket), binary=binary)
    rig = rig_by(server, redis.Redis(port=server.port, db=2))
    url = f"unix://{quote(str(socket))}?db=2"
    rig.worker(url=url, script="echo")
    await whole_round(url, rig.prefix, call)


async def test_another_database(
    own_server: Callable[..., Server], rig_by: Callable[..., Rig], call: Callable[..., Outcome]
) -> None:
    server = own_server()
    rig = rig_by(server, redis.Redis(port=server.port, db=9))
    url = f"redis://127.0.0.1:{server.port}/9"
    worker = rig.worker(url=url, script="echo")
    await whole_round(url, rig.prefix, call)
    rig.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    rig.add("after", {"prompt": "x", "max_tokens": 3})  # a new connection is to the same database
    rig.wait_done("after")
    assert worker.counters.reconnects == 1
    with server.client() as other:
        assert other.dbsize() == 0
    with pytest.raises(ServerUnavailableError, match="DB index is out of range"):
        rig.worker(url=f"redis://127.0.0.1:{server.port}/99")


async def test_odd_characters(
    own_server: Callable[..., Server], rig_by: Callable[..., Rig], call: Callable[..., Outcome]
) -> None:
    server = own_server()
    rig = rig_by(server, server.client())
    rig.client.execute_command("ACL", "SETUSER", USER, "on", f">{PASSWORD}", "~*", "+@all")
    url = f"redis://{quote(USER, safe='')}:{quote(PASSWORD, safe='')}@127.0.0.1:{server.port}/0"
    rig.worker(url=url, script="echo")
    await whole_round(url, rig.prefix, call)
    with pytest.raises(ServerUnavailableError) as caught:
        rig.worker(url=url.replace("p%40ss", "p%40sS"))
    assert "sS" not in str(caught.value)


# --- passwords in files -----------------------------------------------------------------------------------------------


def set_password(client: redis.Redis, password: str) -> None:
    client.execute_command("ACL", "SETUSER", "me", "on", "resetpass", f">{password}", "~*", "+@all")


def connected(worker: ThreadWorker) -> bool:
    links = worker.service.links
    return links.writing.is_connected and links.leases.is_connected


async def test_a_password_that_changes_is_read_again(
    own_server: Callable[..., Server], rig_by: Callable[..., Rig], call: Callable[..., Outcome], tmp_path: Path
) -> None:
    server = own_server()
    rig = rig_by(server, server.client())
    file = tmp_path / "secrets" / "pass word"
    file.parent.mkdir()
    file.write_text(f"{PASSWORD}\r\n")
    set_password(rig.client, PASSWORD)
    url = f"redis://me@127.0.0.1:{server.port}/0?password_file={quote(str(file))}"
    worker = rig.worker(url=url, script="echo", lease_s=3.0)
    await whole_round(url, rig.prefix, call)
    place = ["--redis-url", f"redis://me@127.0.0.1:{server.port}", "--prefix", rig.prefix]
    assert "running" in call("status", *place, "--redis-password-file", str(file)).out
    with Client(url, prefix=rig.prefix) as client:
        assert client.submit("before").result(timeout_s=5).choices[0].text == "before"
        set_password(rig.client, "another one")
        rig.client.execute_command("CLIENT", "KILL", "USER", "me")
        wait_until(lambda: "invalid username-password" in worker.service.links.writing.last_error)
        assert PASSWORD not in str(worker.log.lines)
        file.write_text("another one")
        assert client.submit("after").result(timeout_s=5).choices[0].text == "after"
        wait_until(lambda: connected(worker))


def test_a_file_that_is_not_there(
    own_server: Callable[..., Server], rig_by: Callable[..., Rig], call: Callable[..., Outcome], tmp_path: Path
) -> None:
    server = own_server()
    rig = rig_by(server, server.client())
    file = tmp_path / "password"
    url = f"redis://127.0.0.1:{server.port}/0?password_file={file}"
    with pytest.raises(ServerUnavailableError, match=f"{file} cannot be read: No such file"):
        rig.worker(url=url)
    with Client(url, policy=Policy(give_up_s=0.3)) as client, pytest.raises(UnavailableError, match="No such file"):
        client.submit("Hello")  # it may come yet
    for given in (["--redis-url", url], ["--redis-password-file", str(file)]):
        outcome = call("status", *given)
        assert outcome.code == 2
        assert f"{file} cannot be read: No such file" in outcome.line
    assert "Is a directory" in call("status", "--redis-password-file", str(tmp_path)).line
    file.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in call("status", "--redis-password-file", str(file)).line
