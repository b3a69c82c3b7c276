"""Server addresses: what may stand in one, and how to show it without its password."""

from __future__ import annotations

import re
from urllib.parse import quote, urlsplit, urlunsplit

SCHEMES = ("redis", "rediss", "unix")
DEFAULT_URL = "redis://127.0.0.1:6379/0"

_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):\S*@")  # to the last @: a password may hold one
_PASSWORD_QUERY = re.compile(r"([?&]password=)[^&\s]+")


def check_url(url: str) -> str:
    """Give `url` back if redis-py can use it. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}")
    _ = parts.port  # raises ValueError for what is no port
    if parts.scheme == "unix":
        if not parts.path:
            raise ValueError("no path to a socket")
        return url
    database = parts.path.strip("/")
    if not parts.hostname or (database and not database.isdecimal()):
        raise ValueError("must have a host, and a number as database")
    return url


def with_password(url: str, password: str) -> str:
    """Put a password into an address. Raises ValueError if it has one already."""
    parts = urlsplit(url)
    if parts.password is not None:
        raise ValueError("the address has a password already")
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}"))


def redact(text: str) -> str:
    """`text` with the password of every address in it replaced by `***`."""
    return _PASSWORD_QUERY.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))
