"""Server addresses: one form for each way in which Redis is run, and how to show them without their passwords.

    redis://[[user]:password@]host[:port][/db]                                    one server, or any node of a Cluster
    unix://[[user]:password@]/path/to/socket[?db=0]                               the same, by its socket
    redis+sentinel://[[user]:password@]host[:port][,host[:port]…]/service[/db]    the master that sentinels name
    redis+cluster://[[user]:password@]host[:port][,host[:port]…]                  a Cluster, by some of its nodes

`rediss` in place of `redis` is TLS, to sentinels too. User and password are the server's; what sentinels want is
given as `?sentinel_username=…&sentinel_password=…`. `password_file` and `sentinel_password_file` name files to read a
password from with each new connection. Other options are redis-py's names of what a connection takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast
from urllib.parse import quote, urlsplit, urlunsplit

from redis.connection import parse_url  # pyright: ignore[reportUnknownVariableType]
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError  # noqa: A004  (not Python's)

Node: TypeAlias = tuple[str, int]  # host and port
Kind: TypeAlias = Literal["server", "sentinel", "cluster"]

DEFAULT_URL: Final = "redis://127.0.0.1:6379/0"
FORMS: Final = (
    "redis://[[user]:password@]host[:port][/db], unix:///path, redis+sentinel://host[:port][,host…]/service[/db] "
    "or redis+cluster://host[:port][,host…]; rediss is TLS"
)
_KINDS: Final[dict[str, Kind]] = {"": "server", "+sentinel": "sentinel", "+cluster": "cluster"}
_PORTS: Final[dict[Kind, int]] = {"server": 6379, "sentinel": 26379, "cluster": 6379}
_SCHEME = re.compile(r"(rediss?)(\+sentinel|\+cluster)?")
_NODE = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s\[\]:,/@]+)(?::([0-9]{1,5}))?")
_SENTINEL_OPTION = "sentinel_"
# what an address may say of a pool that we do not use
_IGNORED = ("timeout",)

_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):\S*@")  # to the last @: a password may hold one
_PASSWORD_QUERY = re.compile(r"([?&][a-z_]*password=)[^&\s]+")
# options whose values are none that must not be seen; a misspelt one may be a password's
_SHOWN_OPTION = re.compile(r"(db|[a-z_]+_file|ssl_(ca_certs|certfile|keyfile|check_hostname)|sentinel_username)=.*")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is and how it lets one in. Its text never shows a password, nor what else is an option."""

    kind: Kind
    nodes: tuple[Node, ...]  # the server, the sentinels, or some of a Cluster's nodes; none for a socket
    options: Mapping[str, Any] = field(repr=False)  # of a connection to a server, by redis-py's names
    path: str = ""  # of a Unix socket
    tls: bool = False
    service: str = ""  # what sentinels know the master by
    sentinel_options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)  # of one to a sentinel

    @property
    def user(self) -> str:
        """Whose rights one has there."""
        provider = self.options.get("credential_provider")
        name = provider.username if isinstance(provider, PasswordFile) else self.options.get("username")
        return str(name or "default")

    def at(self, node: Node) -> Address:
        """One server of a Cluster: another place, the same way in."""
        return replace(self, kind="server", nodes=(node,))


def parse_address(url: str) -> Address:
    """Read an address. Raises ValueError, whose words hold nothing of a password."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        options, _ = _options(url)
        if not parts.path.strip("/"):
            raise ValueError("no path to a socket")
        return Address("server", (), options, path=str(options.pop("path")))
    scheme = _SCHEME.fullmatch(parts.scheme)
    if scheme is None:
        raise ValueError("scheme must be one of redis, rediss, unix, redis+sentinel, redis+cluster")
    kind = _KINDS[scheme[2] or ""]
    userinfo, _, hosts = parts.netloc.rpartition("@")
    nodes = tuple(_node(each, _PORTS[kind]) for each in hosts.split(","))
    if kind == "server" and len(nodes) > 1:
        raise ValueError("several hosts are a redis+sentinel or redis+cluster address")
    service, database = _path(kind, parts.path)
    plain = parts._replace(scheme=scheme[1], netloc=f"{userinfo}@h" if userinfo else "h", path=database)
    options, sentinel_options = _options(urlunsplit(plain))
    if kind != "sentinel" and sentinel_options:
        raise ValueError(f"{_SENTINEL_OPTION}… is for redis+sentinel addresses")
    if kind == "cluster" and options.pop("db", 0) != 0:
        raise ValueError("a Cluster has no database but 0")
    return Address(kind, nodes, options, "", scheme[1] == "rediss", service, sentinel_options)


def _path(kind: Kind, path: str) -> tuple[str, str]:
    """The service and the database, both as they stand in an address's path."""
    service, _, database = path.strip("/").partition("/") if kind == "sentinel" else ("", "", path.strip("/"))
    if kind == "sentinel" and not re.fullmatch(r"[A-Za-z0-9_.\-]+", service):
        raise ValueError("must name the service: redis+sentinel://host/service")
    if database and not re.fullmatch(r"[0-9]{1,9}", database):
        raise ValueError("the database must be a number")
    return service, database


def _options(url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an address of one host says of the connection, and what of the one to sentinels."""
    options = cast("dict[str, Any]", parse_url(url))
    for name in ("connection_class", "host", "port", *_IGNORED):
        options.pop(name, None)
    of_sentinels = {name: options.pop(name) for name in list(options) if name.startswith(_SENTINEL_OPTION)}
    if unknown := set(of_sentinels) - {"sentinel_username", "sentinel_password", "sentinel_password_file"}:
        raise ValueError(f"there is no option {min(unknown)}")
    sentinel_options = {name.removeprefix(_SENTINEL_OPTION): value for name, value in of_sentinels.items()}
    return _with_provider(options), _with_provider(sentinel_options)


def _with_provider(options: dict[str, Any]) -> dict[str, Any]:
    """Turn `password_file` into what redis-py asks for credentials with each connection."""
    file = options.pop("password_file", None)
    if file is None:
        return options
    if "password" in options:
        raise ValueError("the address has both a password and a password_file")
    provider = PasswordFile(file, options.pop("username", None))
    return {**options, "credential_provider": provider}


@dataclass(frozen=True)
class PasswordFile(CredentialProvider):
    """A password in a file, read with each new connection, so that one that was changed there is used."""

    path: str
    username: str | None

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """What AUTH takes. Raises redis.ConnectionError if the file cannot be read."""
        try:
            password = Path(self.path).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConnectionError(f"the password file {self.path} cannot be read: {reason}") from None
        return (password,) if self.username is None else (self.username, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """As get_credentials: such a file is small and near."""
        return self.get_credentials()


def with_option(url: str, name: str, value: str) -> str:
    """The address with one more option."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(query="&".join(filter(None, (parts.query, f"{name}={quote(value, safe='/')}")))))


def _node(text: str, default_port: int) -> Node:
    match = _NODE.fullmatch(text)
    if match is None or not 0 <= (port := int(match[2] or default_port)) <= 65535:
        raise ValueError("must have a host, or host:port")
    return match[1].strip("[]"), port


def redact(text: str) -> str:
    """`text` with the password of every address in it replaced by `***`."""
    return _PASSWORD_QUERY.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))


def redact_address(text: str) -> str:
    """As `redact`, for what was meant to be an address and nothing else, however it is written."""
    login, at, place = text.rpartition("@")
    scheme, slashes, login = login.partition("://") if "://" in login else ("", "", login)
    user = re.split("[:?]", login, maxsplit=1)[0]
    place, mark, options = place.partition("?")
    shown = (each if _SHOWN_OPTION.fullmatch(each) else each.partition("=")[0] + "=***" for each in options.split("&"))
    return scheme + slashes + user + (":***" if user != login else "") + at + place + (mark and "?" + "&".join(shown))
