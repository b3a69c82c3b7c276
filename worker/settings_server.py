"""The flags that every command has which speaks to a server: which one, how it lets one in, and which queue on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, SecretStr, StringConstraints

from ..clients.address import DEFAULT_URL, FORMS, with_option
from ..clients.connect import check_url
from .exit_codes import UsageError
from .flags import Flag, FlagSettings

NAME_RULE: Final = "1 to 64 characters of A–Z a–z 0–9 _ . -"
# Flags that are options of the address: both can be given, one of the two at a time.
_OPTIONS: Final = {
    "redis_password_file": "password_file",
    "redis_tls_ca": "ssl_ca_certs",
    "redis_tls_cert": "ssl_certfile",
    "redis_tls_key": "ssl_keyfile",
}


def _checked(url: SecretStr) -> SecretStr:
    check_url(url.get_secret_value())
    return url


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]
Url = Annotated[SecretStr, AfterValidator(_checked)]


def _file(what: str) -> Flag:
    return Flag(what, "a file that can be read", metavar="FILE", panel="Server")


class ServerFlags(FlagSettings):
    """Which server, and which queue on it."""

    redis_url: Annotated[
        Url | None,
        Flag(
            "server to use, by itself, by its sentinels or by nodes of its Cluster",
            FORMS,
            metavar="URL",
            panel="Server",
            default=DEFAULT_URL,
        ),
    ] = None
    redis_password_file: Annotated[Path | None, _file("file with the password, read with each new connection")] = None
    redis_tls_ca: Annotated[
        Path | None, _file("certificates of the CAs that a server's is signed by; without, those of the system")
    ] = None
    redis_tls_cert: Annotated[Path | None, _file("client certificate, with those between it and its CA")] = None
    redis_tls_key: Annotated[Path | None, _file("key of the client certificate, if not in the same file")] = None
    queue: Annotated[Name, Flag("queue", NAME_RULE, metavar="NAME", panel="Server")] = "default"
    prefix: Annotated[Name, Flag("what all keys begin with", NAME_RULE, metavar="NAME", panel="Server")] = "headrace"

    @property
    def names_server(self) -> bool:
        """Whether a server was named in some way."""
        return self.redis_url is not None or any(getattr(self, name) is not None for name in _OPTIONS)

    def url(self) -> str:
        """The server's address with all that leads to it. Raises UsageError if a file cannot be used."""
        url = self.redis_url.get_secret_value() if self.redis_url else DEFAULT_URL
        for name, option in _OPTIONS.items():
            file: Path | None = getattr(self, name)
            if file is not None:
                if f"{option}=" in url:
                    raise UsageError(f"{_flag(name)} and {option} in --redis-url: give one of them")
                url = with_option(url, option, str(file.absolute()))
        try:
            return check_url(url)
        except ValueError as error:
            raise UsageError(by_flags(str(error))) from error


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def by_flags(message: str) -> str:
    """The message with the flags in place of the options that they stand for."""
    for field, option in _OPTIONS.items():
        message = message.replace(option, _flag(field))
    return message
