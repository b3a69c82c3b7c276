"""The three connections of a worker, made once it is known what the server is."""

from __future__ import annotations

from dataclasses import dataclass

from ..clients.address import Address, parse_address, redact
from ..clients.keys import Keys
from .cluster import AnyLink, ClusterLink
from .connection import Link
from .errors import LinkError, ServerUnavailableError, StartupError
from .master_watch import MasterWatch
from .options import WorkerSettings
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
    writing = open_link(settings.url, settings.socket_timeout_s, f"{worker}:writing", keys)
    address = parse_address(settings.url)

    def another(what: str) -> AnyLink:
        if isinstance(writing, ClusterLink):
            return writing.for_home(f"{worker}:{what}")
        return Link(address, settings.socket_timeout_s, f"{worker}:{what}")

    waiting, leases = another("waiting"), another("leases")
    single = tuple(link for link in (writing, waiting, leases) if isinstance(link, Link))
    return Links(writing, waiting, leases, MasterWatch(address, single) if address.kind == "sentinel" else None)


def open_link(url: str, socket_timeout_s: float, name: str, keys: Keys) -> AnyLink:
    """A connection to a server or Cluster to which jobs can be entrusted. Raises StartupError."""
    try:
        return _open(parse_address(url), socket_timeout_s, name, keys)
    except LinkError as error:
        raise ServerUnavailableError(f"no server at {redact(url)}: {error}") from error
    except ValueError as error:
        raise StartupError(f"{redact(url)} is no address of a server: {error}") from error


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
