"""Fixtures of this folder: they live in tests/support, one file per kind."""

from tests.support.cluster import cluster
from tests.support.morgue import morgue, own_morgue
from tests.support.patient import healthy_server, patient
from tests.support.proxy import proxy_to
from tests.support.rig import rig, rig_on
from tests.support.sentinel import own_sentinels
from tests.support.tls import certificates, tls_server
from tests.support.worker_process import start_worker

__all__ = [
    "certificates",
    "cluster",
    "healthy_server",
    "morgue",
    "own_morgue",
    "own_sentinels",
    "patient",
    "proxy_to",
    "rig",
    "rig_on",
    "start_worker",
    "tls_server",
]
