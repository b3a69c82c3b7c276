"""Models of the hub, out of a cache made by hand: what is found without a network, and what is said of the rest."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.errors import ModelError, ModelNotFoundError
from headrace.engine.hub import find_model
from headrace.worker.exit_codes import ExitCode
from tests.support.checkpoints import Shape, checkpoint

NAME = "someone/some-model"
OLD, NEW = "a" * 40, "b" * 40
PROGRAMS = {
    "find": (
        "from headrace.engine.errors import ModelError; from headrace.engine.hub import find_model\n"
        "def call(*place):\n"
        "    try: return str(find_model(*place))\n"
        "    except ModelError as error: return f'{type(error).__name__} {error}'\n"
    ),
    "generate": (
        "from headrace.engine import LLM, SamplingOptions; from headrace.engine.errors import ModelError\n"
        "def call(model, revision):\n"
        "    try: llm = LLM(model, revision=revision)\n"
        "    except ModelError as error: return str(error)\n"
        "    made = llm.generate(['The wheel'], SamplingOptions(max_tokens=3, ignore_eos=True))\n"
        "    return f'{llm.info.name} {len(made[0].token_ids)}'\n"
    ),
    "command": "from headrace.worker.cli import run\ndef call(*words): return int(run(list(words)))\n",
}
LOOP = "import json, sys\nprint(json.dumps([call(*each) for each in json.loads(sys.argv[1])]))"


@dataclass(frozen=True)
class Home:
    """A folder to be HF_HOME, and a listener that counts who calls: there must be nobody where it is forbidden."""

    folder: Path
    port: int
    calls: list[Any]

    def run(self, program: str, *calls: tuple[str, ...], offline: bool = True) -> list[Any]:
        """What the calls of a program give, in a process whose hub is the listener, which hangs up at once."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
        hub = {"HF_HOME": str(self.folder), "HF_ENDPOINT": f"http://127.0.0.1:{self.port}", "NO_PROXY": "*"}
        command = [sys.executable, "-c", PROGRAMS[program] + LOOP, json.dumps(calls)]
        done = subprocess.run(
            command, env={**kept, **hub, "HF_HUB_OFFLINE": str(int(offline))}, check=True, stdout=subprocess.PIPE
        )
        given: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return given

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit."""
        return self.folder / "hub" / "models--someone--some-model" / "snapshots" / commit


@pytest.fixture
def home(tmp_path: Path) -> Any:
    """A cache that holds two commits of one model, the newer as `main` and the older as `v1`."""
    root = tmp_path / "hub" / "models--someone--some-model"
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    for commit, name, shape in ((OLD, "v1", Shape()), (NEW, "main", Shape(seed=1))):
        (root / "snapshots" / commit).mkdir(parents=True)
        (root / "refs" / name).write_text(commit)
        for path in checkpoint(shape).iterdir():
            blob = root / "blobs" / f"{commit[0]}-{path.name}"
            blob.write_bytes(path.read_bytes())
            (root / "snapshots" / commit / path.name).symlink_to(f"../../blobs/{blob.name}")
    calls: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Home(tmp_path, listener.getsockname()[1], calls)

        def hang_up() -> None:
            while True:
                try:
                    connection, who = listener.accept()
                except OSError:
                    return
                calls.append(who)
                connection.close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        yield made
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_cached_model_is_found_without_any_request(home: Home) -> None:
    *found, unknown = home.run("find", (NAME,), (NAME, "v1"), (NAME, OLD), (NAME, "v2"))
    assert found == [str(home.snapshot(commit)) for commit in (NEW, OLD, OLD)]
    assert unknown.startswith(f"ModelNotFoundError {NAME} at revision v2 is not in the local cache {home.folder}/hub")
    assert "HF_HUB_OFFLINE forbids" in unknown
    assert f"hf download {NAME} --revision v2" in unknown
    assert not home.calls


def test_without_a_network_the_cache_is_used_too(home: Home) -> None:
    found, unknown = home.run("find", (NAME, "v1"), ("someone/else",), offline=False)
    assert found == str(home.snapshot(OLD))
    assert unknown.startswith("ModelNotFoundError someone/else is no directory and not in the local cache")
    assert "hf download someone/else (" in unknown
    assert home.calls  # it was asked, and hung up


def test_a_cached_model_runs_and_a_part_of_one_does_not(home: Home) -> None:
    (home.snapshot(NEW) / "model.safetensors").unlink()  # as an interrupted download leaves it
    whole, part = home.run("generate", (NAME, "v1"), (NAME, "main"))
    assert whole == f"{NAME} 3"
    assert part == f"{home.snapshot(NEW)} holds no model.safetensors and no model.safetensors.index.json."
    assert not home.calls


@pytest.mark.parametrize("revision", ["", "../../../etc/passwd", "a/../b", "-x", "a b", "x" * 300, "a\nb"])
def test_revisions_that_cannot_be(revision: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no revision; it must be a branch, a tag or a commit"):
        find_model(NAME, revision)


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is a directory and has no revisions; leave out revision 'v1'"):
        find_model(tmp_path, "v1")


def test_the_commands_take_a_revision(home: Home, tmp_path: Path) -> None:
    check = ("worker", "--embedded", "--check", "--model")
    codes = home.run(
        "command",
        (*check, NAME, "--revision", "v1"),
        (*check, str(tmp_path), "--revision", "v1"),
        (*check, NAME, "--revision", "v9"),
        ("demo", "--model", NAME, "--revision", "-x"),
    )
    assert codes == [ExitCode.OK, ExitCode.USAGE, ExitCode.MODEL, ExitCode.USAGE]
    assert not home.calls
