"""When everything is compiled: where a change may have touched the kernels, and where nobody knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.gates.changed import wanted


def git(root: Path, *args: str) -> None:
    who = ("-c", "user.name=n", "-c", "user.email=e@e")
    subprocess.run(["git", *who, *args], cwd=root, check=True, capture_output=True)


def commit(root: Path, name: str) -> None:
    path = root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    git(root, "add", "-A")
    git(root, "commit", "-m", "m")


def test_what_is_wanted(tmp_path: Path) -> None:
    assert wanted(tmp_path) == "full"  # no repository
    git(tmp_path, "init", "-b", "main")
    commit(tmp_path, "docs/a")
    assert wanted(tmp_path) == "full"  # one commit, and nothing to compare it with
    commit(tmp_path, "docs/a")
    assert wanted(tmp_path) == "core"
    commit(tmp_path, "kernels/a")
    assert wanted(tmp_path) == "full"
    commit(tmp_path, "docs/a")
    assert wanted(tmp_path) == "core"
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a").write_text("x")
    assert wanted(tmp_path) == "full"  # not even added


def test_with_a_remote(tmp_path: Path) -> None:
    upstream, clone = tmp_path / "up", tmp_path / "clone"
    upstream.mkdir()
    git(upstream, "init", "-b", "main")
    commit(upstream, "kernels/a")
    git(tmp_path, "clone", str(upstream), str(clone))
    assert wanted(clone) == "full"  # what has just landed, as the only commit
    commit(clone, "kernels/a")
    commit(clone, "docs/a")
    assert wanted(clone) == "full"  # two commits since the main branch
    git(clone, "push", "origin", "HEAD:other")
    git(clone, "checkout", "-b", "mine", "origin/main")
    commit(clone, "docs/a")
    assert wanted(clone) == "core"
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--depth", "1", f"file://{clone}", str(shallow))
    assert wanted(shallow) == "full"
