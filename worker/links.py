"""The three connections of a worker, made once it is known what the server is."""

from __future__ import annotations

from dataclasses import dataclass

from ..clients.keys import Keys
from .cluster import AnyLink, ClusterLink
from .connection import Link
from .connection_url import redact
from .errors import LinkError, ServerUnavailableError
from .options import WorkerSettings
from .server_check import check_server, is_cluster


@dataclass(frozen=True, slots=True)
class Links:
    """Three, so that none waits for another."""

    writing: AnyLink  # what the step loop sends; never retries by itself
    waiting: AnyLink  # the blocking read of an idle worker
    leases: AnyLink  # the renewal thread's own

    def close(self) -> None:
        """Close all three."""
        for link in (self.writing, self.waiting, self.leases):
            link.close()


def make_links(settings: WorkerSettings, keys: Keys, worker: str) -> Links:
    """Connect, and look at the server and, in a cluster, at every master. Raises StartupError."""
    first = Link(settings.url, settings.socket_timeout_s, f"{worker}:writing")
    try:
        first.connect()
        if not is_cluster(check_server(first)):
            return Links(
                first,
                Link(settings.url, settings.socket_timeout_s, f"{worker}:waiting"),
                Link(settings.url, settings.socket_timeout_s, f"{worker}:leases"),
            )
        first.close()
        made = Links(*(_cluster_link(settings, keys, f"{worker}:{what}") for what in ("writing", "waiting", "leases")))
        made.writing.connect()
        if isinstance(made.writing, ClusterLink):
            for node in made.writing.nodes():
                check_server(node)
        return made
    except LinkError as error:
        raise ServerUnavailableError(f"no server at {redact(settings.url)}: {error}") from error


def _cluster_link(settings: WorkerSettings, keys: Keys, name: str) -> ClusterLink:
    return ClusterLink(settings.url, settings.socket_timeout_s, name, keys.jobs())
