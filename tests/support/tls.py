"""Certificates for tests, made by openssl, and servers that want them: fixtures `certificates` and `tls_server`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.server import Server, free_port, start_server
from tests.support.server_kinds import installed_redis

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_HERE = "IP:127.0.0.1,IP:::1,DNS:localhost"


class Certificates:
    """A folder of certificates and keys, each under a name: two CAs, and what the first of them or the other signed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("ca", "other-ca"):
            self._run("req", "-x509", *_NEW_KEY, *self._named(name), "-addext", "keyUsage=keyCertSign")
        self._sign("server", "ca", _HERE)
        self._sign("elsewhere", "ca", "DNS:elsewhere.example")
        self._sign("client", "ca")
        self._sign("foreign", "other-ca")
        self._sign_expired("expired")
        self._run("ec", "-in", "client.key", "-aes128", "-passout", "pass:hush", "-out", "locked.key")

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def _named(self, name: str) -> tuple[str, ...]:
        return ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt")

    def _sign(self, name: str, by: str, names: str = "") -> None:
        more = ("-addext", f"subjectAltName={names}") if names else ()
        signer = ("-CA", f"{by}.crt", "-CAkey", f"{by}.key")
        self._run("req", "-x509", *_NEW_KEY, *self._named(name), *signer, *more)

    def _sign_expired(self, name: str) -> None:
        (self.folder / "index").touch()
        lines = ["[ca]", "default_ca=a", "[a]", "database=index", "rand_serial=yes", "new_certs_dir=.", "policy=p"]
        lines += ["default_md=sha256", "[p]", "commonName=supplied", "[e]", f"subjectAltName={_HERE}"]
        (self.folder / "ca.conf").write_text("\n".join(lines))
        self._run("req", "-new", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        dates = ("-startdate", "200101000000Z", "-enddate", "200102000000Z")
        files = ("-cert", "ca.crt", "-keyfile", "ca.key", "-in", f"{name}.csr", "-out", f"{name}.crt")
        self._run("ca", "-batch", "-notext", "-config", "ca.conf", "-extensions", "e", *files, *dates)

    def options(self, *, ca: str = "ca", client: str = "client") -> str:
        """Options of an address: what is trusted, and who one is; either may be empty."""
        trusted = [f"ssl_ca_certs={self[ca + '.crt']}"] if ca else []
        own = [f"ssl_certfile={self[client + '.crt']}", f"ssl_keyfile={self[client + '.key']}"] if client else []
        return "&".join(trusted + own)

    def server_args(self, port: int, name: str = "server") -> tuple[str, ...]:
        """What makes a server speak TLS on that port, and want a client certificate there."""
        files = ("--tls-cert-file", self[f"{name}.crt"], "--tls-key-file", self[f"{name}.key"])
        return ("--tls-port", str(port), *files, "--tls-ca-cert-file", self["ca.crt"])

    def sentinel_lines(self, port: int) -> tuple[str, ...]:
        """The same for a sentinel, which also speaks TLS with servers and other sentinels."""
        files = (f"tls-cert-file {self['server.crt']}", f"tls-key-file {self['server.key']}")
        return (f"tls-port {port}", *files, f"tls-ca-cert-file {self['ca.crt']}", "tls-replication yes")


def needs_tls() -> pytest.MarkDecorator:
    """Mark of tests that want a server with TLS, which neither embedded one has."""
    missing = [name for name in ("redis-server", "openssl") if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"no TLS without {' and '.join(missing)}")


class TlsServer:
    """A server by its port with TLS; beside it there is one without, for the test's own client."""

    def __init__(self, server: Server, tls_port: int, certificates: Certificates) -> None:
        self.plain = server
        self.port = tls_port
        self.certificates = certificates
        self.url = f"rediss://127.0.0.1:{tls_port}/0?{certificates.options()}"

    def client(self, **options: object) -> redis.Redis:
        """A client with TLS, without retries."""
        return redis.Redis.from_url(self.url, **{"retry": Retry(NoBackoff(), 0), **options})

    def stop(self) -> None:
        """End it."""
        self.plain.stop()


def start_tls_server(tmp_path: Path, certificates: Certificates, *args: str, name: str = "server") -> TlsServer:
    """A server that shows the certificate `name`."""
    port = free_port()
    server = start_server(tmp_path, *certificates.server_args(port, name), *args, binary=installed_redis())
    return TlsServer(server, port, certificates)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """One set for the whole run."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[TlsServer]:
    """One server for a module."""
    started = start_tls_server(tmp_path_factory.mktemp("tls"), certificates)
    yield started
    started.stop()
