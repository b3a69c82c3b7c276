"""Server addresses: what each form says, what is refused, and that no password shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from headrace.clients.address import Address, parse_address, redact, redact_address, with_option


def facts(address: Address) -> tuple[Any, ...]:
    return address.kind, address.nodes, address.tls, address.service, dict(address.options)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", ("server", (("h", 6379),), False, "", {})),
        ("redis://h:1/2", ("server", (("h", 1),), False, "", {"db": 2})),
        ("rediss://u:p%40%2F@h:1", ("server", (("h", 1),), True, "", {"username": "u", "password": "p@/"})),
        ("redis://:p@[::1]:7", ("server", (("::1", 7),), False, "", {"password": "p"})),
        ("redis://h?socket_keepalive=no", ("server", (("h", 6379),), False, "", {"socket_keepalive": False})),
        ("redis+sentinel://a/main", ("sentinel", (("a", 26379),), False, "main", {})),
        ("redis+sentinel://u@a:1,b,[fe80::1]:3/main/4",
         ("sentinel", (("a", 1), ("b", 26379), ("fe80::1", 3)), False, "main", {"username": "u", "db": 4})),
        ("rediss+sentinel://a/m-1.x?db=3", ("sentinel", (("a", 26379),), True, "m-1.x", {"db": 3})),
        ("redis+cluster://a,b:7000", ("cluster", (("a", 6379), ("b", 7000)), False, "", {})),
        ("rediss+cluster://u:p@a/0", ("cluster", (("a", 6379),), True, "", {"username": "u", "password": "p"})),
    ],
)  # fmt: skip
def test_what_an_address_says(url: str, expected: tuple[Any, ...]) -> None:
    assert facts(parse_address(url)) == expected


def test_a_socket() -> None:
    address = parse_address("unix://u:p@/a%20b/redis.sock?db=2")
    assert (address.path, address.nodes) == ("/a b/redis.sock", ())
    assert dict(address.options) == {"username": "u", "password": "p", "db": 2}


def test_what_sentinels_want_is_not_what_the_server_wants() -> None:
    url = "redis+sentinel://u:p@a/main?sentinel_username=s&sentinel_password=q%26"
    address = parse_address(url)
    assert dict(address.options) == {"username": "u", "password": "p"}
    assert dict(address.sentinel_options) == {"username": "s", "password": "q&"}


@pytest.mark.parametrize(
    "url",
    [
        "", "h", "http://h", "redis://", "redis:///0", "redis://h:x", "redis://h:99999", "redis://h/x", "redis://a,b",
        "redis://h/1/2", "redis+sentinel://a", "redis+sentinel://a/", "redis+sentinel://a,/main", "redis+sentinel:///m",
        "redis+sentinel://a/main/x", "redis+sentinel://a/ma in", "redis+cluster://a/1", "redis+cluster://a,:1",
        "redis+other://a", "unix://", "unix:///", "redis://a?sentinel_password=hush", "redis://[::1",
        "redis+sentinel://a/m?sentinel_master=x", "redis://:hush@h?password_file=/x", "redis://h?db=hush",
    ],
)  # fmt: skip
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_address(url)
    assert "hush" not in str(caught.value)


def test_a_value_shows_no_password() -> None:
    assert "hush" not in repr(parse_address("redis+sentinel://u:hush@a/main?sentinel_password=hush"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://:pw@h", "redis://:***@h"),
        ("rediss://u:p@w@h", "rediss://u:***@h"),
        ("unix://u@/path?password=pw&db=1", "unix://u@/path?password=***&db=1"),
        ("cannot reach redis://u:pw@h: no", "cannot reach redis://u:***@h: no"),
        ("redis+sentinel://u:pw@a:1,b:2/m?sentinel_password=pw&db=1",
         "redis+sentinel://u:***@a:1,b:2/m?sentinel_password=***&db=1"),
        ("redis+sentinel://a:1,b:2/main: no", "redis+sentinel://a:1,b:2/main: no"),
        ("rediss+cluster://:pw@a?ssl_password=pw", "rediss+cluster://:***@a?ssl_password=***"),
    ],
)  # fmt: skip
def test_redacting(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis+sentinel://u:hush@a:1,b:2/m?sentinel_password=hush&db=1&ssl_ca_certs=/a/b",
         "redis+sentinel://u:***@a:1,b:2/m?sentinel_password=***&db=1&ssl_ca_certs=/a/b"),
        ("redis://h:1/0?password_file=/run/p", "redis://h:1/0?password_file=/run/p"),
        ("u:hush@h", "u:***@h"),
        ("redis//u:hush@h", "redis//u:***@h"),
        ("redis://u:a hush@h", "redis://u:***@h"),
        ("redis://u:a?hush=1@h", "redis://u:***@h"),
        ("redis://u@h?pasword=hush", "redis://u@h?pasword=***"),
        ("redis://h?pasword=hush@h", "redis://h:***@h"),
    ],
)  # fmt: skip
def test_redacting_what_should_have_been_an_address(text: str, shown: str) -> None:
    assert redact_address(text) == shown


def test_a_password_file_is_read_each_time(tmp_path: Path) -> None:
    file = tmp_path / "p w"
    file.write_text("first one \n")
    url = with_option("redis://u@h/1?db=2", "password_file", str(file))
    assert set(parse_address(url).options) == {"db", "credential_provider"}
    provider = parse_address(url).options["credential_provider"]
    assert provider.get_credentials() == ("u", "first one ")
    file.write_text("second\r\n")
    assert provider.get_credentials() == ("u", "second")
    assert parse_address(with_option("redis://h", "password_file", str(file))).options[
        "credential_provider"
    ].get_credentials() == ("second",)
    file.unlink()
    with pytest.raises(redis.ConnectionError, match="No such file"):
        provider.get_credentials()
