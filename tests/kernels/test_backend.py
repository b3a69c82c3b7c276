"""How a backend is chosen, and how the compiled library comes to be."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.kernels import backend
from headrace.kernels.backend import CHOICES, choose_backend, open_backend, open_library
from headrace.kernels.cpu import build
from headrace.kernels.cpu.library import CpuLibrary
from headrace.kernels.errors import BackendError, BuildError

NONE = BuildError("no C++ compiler found")


def compiled() -> CpuLibrary:
    library = open_library()
    if isinstance(library, BuildError):
        pytest.skip(f"no compiled kernels here: {library}")
    return library


def test_auto_takes_the_compiled_library_and_says_so() -> None:
    assert choose_backend("auto", "cpu", compiled()).name == "cpu"
    assert choose_backend("torch", "cpu", compiled()).name == "torch"


def test_without_a_library_auto_is_torch_with_a_reason_and_cpu_is_refused() -> None:
    chosen = choose_backend("auto", "cpu", NONE)
    assert (chosen.name, chosen.reason) == ("torch", "no C++ compiler found")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        choose_backend("cpu", "cpu", NONE)


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(BackendError, match="auto, cpu, torch") as caught:
        choose_backend("cuda", "cpu", NONE)
    assert caught.value.choices == CHOICES


def test_a_backend_is_never_moved_to_another_device() -> None:
    for name in ("auto", "cpu"):
        with pytest.raises(BackendError, match="does not run on cuda"):
            choose_backend(name, "cuda", NONE)


def test_the_slow_way_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    with caplog.at_level(logging.WARNING, logger=backend.__name__):
        chosen = open_backend("auto", "cpu")
    assert chosen.name == "torch"
    assert [record.message for record in caplog.records] == [
        f"CPU kernels in plain torch, which is much slower: {chosen.reason}"
    ]


def test_a_failing_compiler_is_reported_with_what_it_said(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho this machine is too old\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(BuildError, match="failed on") as caught:
        build.library_path({"CXX": str(compiler), "HEADRACE_CACHE_DIR": str(tmp_path / "cache")})
    assert caught.value.output == "this machine is too old\n"
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    compiled()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BuildError, match="cannot be used"):
        build.library_path({**os.environ, "HEADRACE_CACHE_DIR": str(tmp_path / "file" / "cache")})


def test_where_the_cache_is(tmp_path: Path) -> None:
    assert build.cache_dir({"HEADRACE_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}) == Path("/own")
    assert build.cache_dir({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/headrace")
    assert build.cache_dir({}) == Path.home() / ".cache" / "headrace"


def test_another_cpu_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled()
    sources = {"a.cpp": b"1"}
    compiler = build.find_compiler(os.environ)
    key = build._key(compiler, sources)
    assert build._key(compiler, {"a.cpp": b"2"}) != key
    monkeypatch.setattr(build, "cpu_features", lambda: "fpu")
    assert build._key(compiler, sources) != key


def test_two_processes_build_at_once_and_both_can_load(tmp_path: Path) -> None:
    compiled()
    code = (
        "from headrace.kernels.cpu.build import library_path; import ctypes; ctypes.CDLL(library_path()); print('ok')"
    )
    environment = {**os.environ, "HEADRACE_CACHE_DIR": str(tmp_path)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].split()[-1:] for process in running] == [[b"ok"], [b"ok"]]
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


@pytest.mark.parametrize(
    "bad", [torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 8)[:, ::2], torch.zeros(4, 4, dtype=torch.float16)]
)
def test_tensors_that_the_library_cannot_read_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(TypeError):
        compiled().rms_norm(bad, torch.ones(4, dtype=bad.dtype), 1e-5)


def test_other_python_threads_run_during_a_call() -> None:
    import threading
    import time

    library, stamps = compiled(), list[float]()
    running = threading.Event()
    scores = torch.randn(60, 50_000)
    p = torch.ones(60)
    zeros = torch.zeros(60, dtype=torch.int64)

    def watch() -> None:
        running.set()
        while running.is_set():
            stamps.append(time.perf_counter())
            time.sleep(0.001)

    from headrace.kernels.sample import SampleParameters

    thread = threading.Thread(target=watch)
    thread.start()
    running.wait()
    begin = time.perf_counter()
    library.sample(scores, SampleParameters(p, zeros.int(), p * 0.9, p * 0, zeros, zeros, zeros))
    end = time.perf_counter()
    running.clear()
    thread.join()
    assert sum(begin < stamp < end for stamp in stamps) >= 3, f"nothing ran in {end - begin:.3f} s"
