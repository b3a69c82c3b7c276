"""Every vector, byte for byte: the protocol as other programs may rely on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import Server, start_server
from tests.vectors.runner import all_vectors, load, run_vector


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for the vectors alone: each begins with an empty one."""
    server = start_server(tmp_path_factory.mktemp("vectors"))
    yield server
    server.stop()


@pytest.mark.parametrize("path", all_vectors(), ids=lambda path: path.stem)
def test_vector(own: Server, path: Path) -> None:
    vector = load(path)
    assert run_vector(vector, own) == vector["expected"]


def test_there_is_a_vector_for_each_rule() -> None:
    assert len(all_vectors()) >= 30
