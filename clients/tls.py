"""TLS: its files are looked at before anything connects, and what goes wrong with it is said in one sentence."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from .address import Address
from .errors import ConfigError

_PREFIX: Final = "ssl_"
# What a library of TLS calls it, and what it comes from. Waiting mends none of these.
_TROUBLES: Final[tuple[tuple[str, str], ...]] = (
    ("CERTIFICATE_REQUIRED", "the server wants a client certificate: give ssl_certfile and ssl_keyfile"),
    ("ALERT_UNKNOWN_CA", "the server does not trust the CA of the client certificate (ssl_certfile)"),
    ("ALERT_BAD_CERTIFICATE", "the server does not accept the client certificate (ssl_certfile)"),
    ("ALERT_CERTIFICATE_EXPIRED", "the client certificate (ssl_certfile) has expired"),
    ("ALERT", "the server refused the TLS connection"),
    ("WRONG_VERSION_NUMBER", "the server does not speak TLS on this port: rediss is for a port with TLS"),
)
_NOT_TRUSTED: Final = (18, 19, 20, 21)  # OpenSSL's numbers: signed by itself or by nobody known
_EXPIRED: Final = 10
_OTHER_NAME: Final = (62, 64)


def check_tls(address: Address, options: Mapping[str, Any]) -> None:
    """See that the files of a certificate can be used. Raises ConfigError, which names the option."""
    given = {name: value for name, value in options.items() if name.startswith(_PREFIX)}
    if not address.tls:
        if given:
            raise ConfigError(f"{min(given)} is for rediss addresses", "target")
        return
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in given:
            _check_readable(name, given[name])
    context = ssl.create_default_context()
    ca_file, certificate, key = (given.get(name) for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"))
    if key and not certificate:
        raise ConfigError("ssl_keyfile needs ssl_certfile", "target")
    try:
        if ca_file:
            context.load_verify_locations(ca_file)
    except ssl.SSLError:
        raise ConfigError(f"ssl_ca_certs {ca_file} holds no certificate in PEM", "target") from None
    try:
        if certificate:
            # an empty password: without one a key that wants it would be asked for on the terminal
            context.load_cert_chain(certificate, key, given.get("ssl_password", ""))
    except ssl.SSLError as error:
        reason = (error.reason or "no certificate and key in PEM, or another password").replace("_", " ").lower()
        files = f"ssl_certfile {certificate}" + (f" and ssl_keyfile {key}" if key else ", without ssl_keyfile")
        raise ConfigError(f"{files}: {reason}", "target") from None


def _check_readable(name: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}", "target") from None


def tls_trouble(error: BaseException) -> str | None:
    """What is wrong with TLS for good, in a sentence; None if it is something else, or may pass."""
    for each in _chain(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            return _certificate_trouble(each)
        if isinstance(each, ssl.SSLError) and each.reason:
            return next((words for name, words in _TROUBLES if name in each.reason), None)
    return None


def tls_hint(error: BaseException) -> str:
    """What may be wrong with TLS where a new connection was ended or nothing came; empty if that cannot be."""
    for each in _chain(error):
        if isinstance(each, ssl.SSLEOFError):
            return "the server ended the TLS connection; it may want a client certificate (ssl_certfile, ssl_keyfile)"
        if isinstance(each, TimeoutError) and "handshake" in str(each):
            return "nothing came back in the TLS handshake; the port may be one without TLS"
    return ""


def _certificate_trouble(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _NOT_TRUSTED:
        return "the server's certificate is signed by no CA that is trusted here: name its CA's file with ssl_ca_certs"
    if error.verify_code == _EXPIRED:
        return "the server's certificate has expired"
    if error.verify_code in _OTHER_NAME:
        return f"the server's certificate is for another name: {error.verify_message.rstrip('.')}"
    return f"the server's certificate is not valid: {error.verify_message}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
