"""The built wheel, installed where nothing else is: what a user gets from `pip install`."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What must not leak in from the environment that runs the tests, or from the checkout.
CLEAN_ENV = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "HEADRACE_"))}


def run(*command: str | Path, cwd: Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=CLEAN_ENV, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy of the tracked sources, so that no stray file of a working tree gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    done = run(sys.executable, "-m", "build", "--wheel", "--outdir", out, source, cwd=out)
    assert done.returncode == 0, done.stderr[-3000:]
    return next(out.glob("headrace-*.whl"))


def environment(path: Path) -> Path:
    venv.create(path, with_pip=True)
    return path / "bin"


def test_the_wheel_holds_the_packages_and_their_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"headrace", f"headrace-{wheel.name.split('-')[1]}.dist-info"}
    assert {name.split("/")[1] for name in names if name.startswith("headrace/")} == {
        "clients", "demo_model", "engine", "kernels", "worker",
    }  # fmt: skip
    for needed in (
        "headrace/clients/py.typed", "headrace/clients/scripts/append.lua", "headrace/worker/py.typed",
        "headrace/engine/py.typed", "headrace/kernels/py.typed", "headrace/demo_model/model.safetensors",
        "headrace/demo_model/tokenizer.json", "headrace/kernels/cpu/paged_attention.cpp",
    ):  # fmt: skip
        assert needed in names


def test_the_base_install_is_a_client_without_torch(wheel: Path, tmp_path: Path) -> None:
    bin_ = environment(tmp_path / "env")
    constraints = ROOT / "constraints" / "cpu.txt"
    done = run(bin_ / "pip", "install", "-q", "-c", constraints, wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    done = run(bin_ / "python", "-c", "import headrace.clients as c; c.Client, c.AsyncClient", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert run(bin_ / "python", "-c", "import torch", cwd=tmp_path).returncode != 0
    assert run(bin_ / "headrace", "--help", cwd=tmp_path).returncode == 0
    refused = run(bin_ / "headrace", "worker", "--model", "demo", "--embedded", cwd=tmp_path)
    assert refused.returncode != 0
    assert "headrace[worker]" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_demo_runs_from_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    bin_ = environment(tmp_path / "env")
    constraints = ROOT / "constraints" / "cpu.txt"
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import setup_env
    finally:
        sys.path.pop(0)
    setup_env.install_torch(constraints, bin_ / "python")
    done = run(bin_ / "pip", "install", "-q", "-c", constraints, f"{wheel}[worker]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    done = run(bin_ / "headrace", "demo", cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "서울" in done.stdout
    assert "\x1b" not in done.stdout  # piped: plain text
