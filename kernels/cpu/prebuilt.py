"""Libraries compiled beforehand, for machines without a compiler: an image carries one for each kind of CPU.

    python -m headrace.kernels.cpu.prebuilt [DIR]

writes them beside this file, or into DIR. A file's name says the sources it was made of, so that one of other sources
is never taken.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from .build import FLAGS, build, cpu_features, find_compiler, read_sources, sources_digest

DIR = Path(__file__).parent / "prebuilt"


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of CPU: what the compiler may use, and what /proc/cpuinfo must name for that."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
VARIANTS = (  # the best first
    Variant(
        "x86-64-v4-bf16", ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"), _V4 | {"avx512_bf16", "avx512_vnni"}
    ),
    Variant("x86-64-v4", ("-march=x86-64-v4",), _V4),
    Variant("x86-64-v3", ("-march=x86-64-v3",), _V3),
)


def prebuilt_path(directory: Path = DIR, features: str | None = None) -> Path | None:
    """Give the best library in `directory` that this CPU can run and that is made of today's sources, if any."""
    found = frozenset((cpu_features() if features is None else features).split())
    paths = (_path(directory, variant) for variant in VARIANTS if variant.needs <= found)
    return next((path for path in paths if path.is_file()), None)


def build_variants(directory: Path, variants: tuple[Variant, ...] = VARIANTS) -> list[Path]:
    """Compile libraries into `directory`. Raises BuildError, as where the compiler is for another kind of machine."""
    compiler = find_compiler()
    made: list[Path] = []
    for variant in variants:
        path = _path(directory, variant)
        build(compiler, path, (*(flag for flag in FLAGS if flag != "-march=native"), *variant.flags))
        made.append(path)
    return made


def _path(directory: Path, variant: Variant) -> Path:
    return directory / f"{variant.name}-{sources_digest(read_sources())}.so"


if __name__ == "__main__":
    if platform.machine() != "x86_64":
        sys.exit(0)  # no variants for others: they compile at the first start
    for library in build_variants(Path(sys.argv[1]) if len(sys.argv) > 1 else DIR):
        sys.stdout.write(f"{library}\n")
