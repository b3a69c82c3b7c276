"""How a backend is chosen, and how the compiled library comes to be."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.kernels import backend
from headrace.kernels.backend import CHOICES, choose_backend, open_backend, open_library
from headrace.kernels.cpu import build, prebuilt
from headrace.kernels.cpu.library import CpuLibrary
from headrace.kernels.errors import BackendError, BuildError
from headrace.kernels.matrix import plain_matrix

NONE = BuildError("no C++ compiler found")


def compiled() -> CpuLibrary:
    library = open_library()
    if isinstance(library, BuildError):
        pytest.skip(f"no compiled kernels here: {library}")
    return library


def test_auto_takes_the_compiled_library_and_says_so() -> None:
    assert choose_backend("auto", "cpu", compiled()).name == "cpu"
    assert choose_backend("torch", "cpu", compiled()).name == "torch"


def test_a_unit_for_products_is_used_through_torch() -> None:
    assert choose_backend("auto", "cpu", compiled(), has_matrix_unit=True).name == "cpu-onednn"
    assert choose_backend("cpu", "cpu", compiled(), has_matrix_unit=True).name == "cpu"
    assert choose_backend("cpu-onednn", "cpu", compiled()).name == "cpu-onednn"
    assert choose_backend("auto", "cpu", NONE, has_matrix_unit=True).name == "torch"


@pytest.mark.parametrize(
    ("features", "dtype", "name"),
    [
        ("fma avx512_bf16", torch.bfloat16, "cpu"),
        ("fma avx512_bf16 amx_bf16", torch.bfloat16, "cpu-onednn"),
        ("fma avx512_bf16 amx_bf16", torch.float32, "cpu"),
        ("asimd bf16", torch.bfloat16, "cpu-onednn"),
        ("", torch.bfloat16, "cpu"),
    ],
)
def test_what_the_cpu_has_decides(
    monkeypatch: pytest.MonkeyPatch, features: str, dtype: torch.dtype, name: str
) -> None:
    library = compiled()
    monkeypatch.setattr(backend, "open_library", lambda: library)
    monkeypatch.setattr(backend, "cpu_features", lambda: features)
    assert open_backend("auto", "cpu", dtype).name == name


def test_without_a_library_auto_is_torch_with_a_reason_and_cpu_is_refused() -> None:
    chosen = choose_backend("auto", "cpu", NONE)
    assert (chosen.name, chosen.reason) == ("torch", "no C++ compiler found")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        choose_backend("cpu", "cpu", NONE)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        choose_backend("cpu-onednn", "cpu", NONE)


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(BackendError, match="auto, cpu, cpu-onednn, torch") as caught:
        choose_backend("cuda", "cpu", NONE)
    assert caught.value.choices == CHOICES


def test_a_backend_is_never_moved_to_another_device() -> None:
    for name in ("cpu", "cpu-onednn"):
        with pytest.raises(BackendError, match="does not run on cuda"):
            choose_backend(name, "cuda", NONE)
    with pytest.raises(BackendError, match="does not run on cpu"):
        choose_backend("triton", "cpu", NONE)
    assert choose_backend("auto", "cuda", NONE).name == "triton"


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


def test_a_library_that_came_with_the_package_gives_the_same_bits(tmp_path: Path) -> None:
    own, features = compiled(), build.cpu_features()
    variant = prebuilt.VARIANTS[-1]
    if not variant.needs <= set(features.split()):
        pytest.skip(f"this CPU is no {variant.name}")
    (path,) = prebuilt.build_variants(tmp_path, (variant,))
    assert prebuilt.prebuilt_path(tmp_path) == path
    assert prebuilt.prebuilt_path(tmp_path, "fpu sse2") is None
    other = CpuLibrary(path)
    weight = torch.randn(130, 77, generator=torch.Generator().manual_seed(0))
    x = torch.randn(9, 77, generator=torch.Generator().manual_seed(1))
    results = [library.linear(x, library.pack(plain_matrix(weight))) for library in (own, other)]
    assert torch.equal(*results)


@pytest.mark.parametrize("variant", prebuilt.VARIANTS, ids=lambda variant: variant.name)
def test_the_sources_are_right_for_every_kind_of_cpu(variant: prebuilt.Variant) -> None:
    """Also for those that this machine is none of: the compiler reads them without making code."""
    if platform.machine() != "x86_64":
        pytest.skip("variants are for x86-64")
    folder = Path(build.__file__).parent
    flags = (*(flag for flag in build.FLAGS if flag != "-march=native"), *variant.flags, "-fsyntax-only")
    command = [build.find_compiler(os.environ), *flags, *(str(folder / unit) for unit in build.UNITS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_best_variant_that_the_cpu_runs_is_taken(tmp_path: Path) -> None:
    places = {variant.name: prebuilt._path(tmp_path, variant) for variant in prebuilt.VARIANTS}
    for place in places.values():
        place.touch()
    all_of = {variant.name: " ".join(variant.needs) for variant in prebuilt.VARIANTS}
    for name, features in all_of.items():
        assert prebuilt.prebuilt_path(tmp_path, f"{features} sse9") == places[name]
    places["x86-64-v4"].unlink()
    assert prebuilt.prebuilt_path(tmp_path, all_of["x86-64-v4"]) == places["x86-64-v3"]


def test_a_library_of_other_sources_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = prebuilt.VARIANTS[-1]
    prebuilt._path(tmp_path, variant).touch()
    features = " ".join(variant.needs)
    assert prebuilt.prebuilt_path(tmp_path, features) is not None
    monkeypatch.setattr(prebuilt, "read_sources", lambda: {"a.cpp": b"1"})
    assert prebuilt.prebuilt_path(tmp_path, features) is None


def test_two_processes_build_at_once_and_both_can_load(tmp_path: Path) -> None:
    compiled()
    code = (
        "from headrace.kernels.cpu.build import library_path; import ctypes; ctypes.CDLL(library_path()); print('ok')"
    )
    quick = tmp_path / "quick"  # this is about files: what the compiler makes need not be good
    quick.write_text(f'#!/bin/sh\nexec {build.find_compiler()} "$@" -O0\n')
    quick.chmod(0o755)
    cache = tmp_path / "cache"
    environment = {**os.environ, "HEADRACE_CACHE_DIR": str(cache), "CXX": str(quick)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0].split()[-1:] for process in running] == [[b"ok"], [b"ok"]]
    assert [path.suffix for path in cache.iterdir()] == [".so"]


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
