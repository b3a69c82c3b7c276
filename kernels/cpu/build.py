"""Compiles the C++ sources once per machine and keeps the library in a cache.

The cache's key covers the sources, the compiler and the CPU's features, because the code is compiled for exactly this
CPU and a home directory may be shared between machines. Files are written under a name of their own and renamed, so
that several processes may build at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..errors import BuildError

UNITS = (
    "product.cpp", "compress.cpp", "score.cpp", "screen.cpp", "screen_parts.cpp", "paged_attention.cpp",
    "attention_plan.cpp", "elementwise.cpp", "rotary.cpp", "experts.cpp", "sample.cpp", "program.cpp", "team.cpp",
)  # fmt: skip
SHARED = (  # included by the units
    "vectors.h", "vectors_whole.h", "vectors_pairs.h", "simd.cpp", "panels.cpp",
    "steps.cpp", "attention_tile.cpp", "compressed.h", "product.h", "ops.h", "score.h",
    "screen.h", "screen_parts.h", "kv_cache.h", "team.h",
)  # fmt: skip
COMPILERS = ("g++", "clang++", "c++")
# No contraction by the compiler: what is fused is written so, and every copy of a loop then rounds alike.
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-psabi",
    "-fPIC",
)
TIMEOUT_S = 300.0  # of one unit: fifteen seconds by itself, much more on a machine that is busy


def library_path(environment: Mapping[str, str] | None = None) -> Path:
    """Give the path of the compiled library, building it first if the cache does not hold it.

    `environment` (by default the process's) may name the cache with HEADRACE_CACHE_DIR or XDG_CACHE_HOME, and the
    compiler with CXX.

    Raises:
        BuildError: there is no compiler, it fails, or the cache cannot be written.
    """
    variables = os.environ if environment is None else environment
    compiler = find_compiler(variables)
    path = cache_dir(variables) / f"cpu-{_key(compiler, read_sources())}.so"
    if not path.is_file():
        build(compiler, path)
    return path


def read_sources() -> dict[str, bytes]:
    """Give the content of every source by its name."""
    return {name: (Path(__file__).parent / name).read_bytes() for name in (*UNITS, *SHARED)}


def sources_digest(sources: Mapping[str, bytes]) -> str:
    """Give what stands for the sources in a file's name."""
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(f"{name}:{len(sources[name])}:".encode() + sources[name])
    return digest.hexdigest()[:24]


def cache_dir(environment: Mapping[str, str]) -> Path:
    """Where compiled libraries are kept."""
    if own := environment.get("HEADRACE_CACHE_DIR"):
        return Path(own)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def find_compiler(environment: Mapping[str, str] | None = None) -> str:
    """Give the C++ compiler's path: $CXX, or the first that the machine has. Raises BuildError."""
    environment = os.environ if environment is None else environment
    wanted = (environment["CXX"],) if environment.get("CXX") else COMPILERS
    for name in wanted:
        if path := shutil.which(name, path=environment.get("PATH")):
            return path
    raise BuildError(f"no C++ compiler found (looked for {', '.join(wanted)})")


def cpu_features() -> str:
    """What distinguishes this CPU from others that run the same operating system."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (" ".join(sorted(line.split(":")[1].split())) for line in lines if line.startswith(("flags", "Features"))), ""
    )


def _key(compiler: str, sources: Mapping[str, bytes]) -> str:
    status = Path(compiler).resolve().stat()  # of the file itself: `--version` would start a process each time
    identity = f"{Path(compiler).resolve()}:{status.st_size}:{status.st_mtime_ns}:{' '.join(FLAGS)}"
    key = f"{identity}:{platform.machine()}:{cpu_features()}:{sources_digest(sources)}"
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def build(compiler: str, path: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile the units side by side, link them, and move the library to its place. Raises BuildError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as scratch:
            objects = [str(Path(scratch) / f"{unit}.o") for unit in UNITS]
            commands = [
                [compiler, *flags, "-c", "-o", made, str(Path(__file__).parent / unit)]
                for unit, made in zip(UNITS, objects, strict=True)
            ]
            _run(commands)
            library = Path(scratch) / path.name
            _run([[compiler, "-shared", "-pthread", "-o", str(library), *objects]])
            library.replace(path)
    except OSError as error:
        raise BuildError(f"the cache directory {path.parent} cannot be used: {error}") from error


def _run(commands: list[list[str]]) -> None:
    """Run compilers at the same time and wait for all of them. Raises BuildError for the first that failed."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603
        for command in commands
    ]
    failed: list[tuple[str, str]] = []
    for process, command in zip(running, commands, strict=True):
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        if process.returncode != 0:
            failed.append((command[-1], output))
    if failed:
        raise BuildError(f"the compiler {commands[0][0]} failed on {failed[0][0]}", failed[0][1])
