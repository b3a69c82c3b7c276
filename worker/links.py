"""The three connections of a worker, made once it is known what the server is."""

from __future__ import annotations

from dataclasses import dataclass

from ..clients.address import Address, parse_address, redact_address
from ..clients.errors import ConfigError
from ..clients.keys import Keys
from .cluster import AnyLink, ClusterLink
from .connection import Link
from .errors import LinkError, ServerUnavailableError, StartupError
from .master_watch import MasterWatch
from .options import WorkerSettings
from .rights import check_rights, line_to_add, missing_in
from .server_check import check_server, is_cluster


@dataclass(frozen=True, slots=True)
class Links:
    """Three, so that none waits for another."""

    writing: AnyLink  # what the step loop sends; never retries by itself
    waiting: AnyLink  # the blocking read of an idle worker
    leases: AnyLink  # the renewal thread's own
    watch: MasterWatch | None  # where sentinels name the master

    def close(self) -> None:
        """Close all three."""
        if self.watch is not None:
            self.watch.close()
        for link in (self.writing, self.waiting, self.leases):
            link.close()


def make_links(settings: WorkerSettings, keys: Keys, worker: str) -> Links:
    """Connect, and look at the server and, in a cluster, at every master. Raises StartupError."""
    writing = open_link(settings.url, settings.socket_timeout_s, worker, keys)
    address = parse_address(settings.url)

    def another(what: str) -> AnyLink:
        if isinstance(writing, ClusterLink):
            return writing.for_home(f"{worker}:{what}")
        return Link(address, settings.socket_timeout_s, f"{worker}:{what}")

    waiting, leases = another("waiting"), another("leases")
    single = tuple(link for link in (writing, waiting, leases) if isinstance(link, Link))
    return Links(writing, waiting, leases, MasterWatch(address, single) if address.kind == "sentinel" else None)


def open_link(url: str, socket_timeout_s: float, worker: str, keys: Keys) -> AnyLink:
    """A connection to a server or Cluster to which jobs can be entrusted, by a user with all rights that that takes.

    Raises StartupError.
    """
    try:
        address = parse_address(url)
    except ValueError as error:
        raise StartupError(f"{redact_address(url)} is no address of a server: {error}") from error
    try:
        link = _open(address, socket_timeout_s, f"{worker}:writing", keys)
        check_rights(link, keys, worker, address.user)
    except ConfigError as error:
        raise StartupError(f"{redact_address(url)} is no address of a server: {error}") from error
    except LinkError as error:
        missing = missing_in(str(error))
        what_to_do = f"; {line_to_add(address.user, missing)}" if missing else ""
        raise ServerUnavailableError(f"no server at {redact_address(url)}: {error}{what_to_do}") from error
    return link


def _open(address: Address, socket_timeout_s: float, name: str, keys: Keys) -> AnyLink:
    if address.kind != "cluster":
        link = Link(address, socket_timeout_s, name)
        link.connect()
        if not is_cluster(check_server(link)):
            return link
        link.close()
    cluster = ClusterLink(address, socket_timeout_s, name, keys.jobs())
    cluster.connect()
    for node in cluster.nodes():
        check_server(node)
    return cluster
